"""How many Keys each Query row sees, and which: the N that a policy reads (arXiv 2610.05106).

A row's count is the persistent context plus the part of the current draft block it sees; masked and
padded positions do not count, nor does a learned attention sink, which is a term of the softmax and
no Key. Keys of a request lie in slots from 0; a row in slot p sees, when causal, the Keys in slots
up to p; when not causal, all of them. A window of w hides the Keys whose slot is w or more away
from the row's own, behind it and ahead of it alike; sinks are the first Keys of all, which a window
does not hide (StreamingLLM, arXiv 2309.17453). Counts and masks are of this one rule, `View`; any
other pattern is counted with `mask_keys` on its mask.

Counts are int64 on the device of their tensors. Python integers are checked; values inside tensors
are not, as reading them would make the host wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class View:
    """What the rows of an attention layer see of the Keys in their request's cache.

    causal: nothing behind their own slot. window: no slot that is so many away, or more; None for
    no window. sinks: how many of the first Keys are seen though a window hides them.

    Raises ValueError for a window below 1, or a negative number of sinks.
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window is not None:
            _require_positive("window", self.window)
        if self.sinks < 0:
            raise ValueError(f"sinks must not be negative, got {self.sinks}")

    def count(self, context: int | Tensor, rows: int) -> Tensor:
        """Keys that each of `rows` new rows sees: int64 [rows].

        context: Keys in the cache before the first row, a number or int64 [1].
        """
        return (causal_keys if self.causal else block_keys)(context, rows, self.window, self.sinks)[
            0
        ]

    def mask(self, context: int, rows: int, device: torch.device) -> Tensor | None:
        """Visible Keys: bool [rows, context + rows]; None where every row sees them all."""
        if not self.hides(context, rows):
            return None
        return self.sees(torch.arange(context, context + rows, device=device), context + rows)

    def hides(self, context: int, rows: int) -> bool:
        """Whether one of `rows` new rows may not see a Key that is there: without sinks, whether it
        does not."""
        windowed = self.window is not None and context + rows > self.window
        return windowed or (self.causal and rows > 1)

    def reach(self, start: int) -> tuple[int, int]:
        """What rows from slot `start` on may see: how many of the first Keys, and from which slot
        on the others; what lies between need not be read."""
        first = 0 if self.window is None else max(0, start - self.window + 1)
        return min(self.sinks, first), first

    def sees(self, slots: Tensor, keys: int | Tensor) -> Tensor:
        """Which Keys the rows in `slots` [rows] see: bool [rows, keys].

        keys: the Keys' own slots, int64 [keys], or a number for those from 0 on. Rows that are not
        causal see each other and nothing behind the last of them.
        """
        key = keys if isinstance(keys, Tensor) else torch.arange(keys, device=slots.device)
        key, own = key[None], slots[:, None]
        visible = key <= (own if self.causal else own[-1:].expand_as(own))
        if self.window is not None:
            near = (own - key < self.window) & (key - own < self.window)
            visible = visible & (near | (key < self.sinks))
        return visible


CAUSAL = View()


def block_keys(
    context: Tensor | int, block: int, window: int | None = None, sinks: int = 0
) -> Tensor:
    """Keys that each row of a non-causal draft block sees (DFlash): `context + block`, fewer with a
    window.

    Row i of the block sits at position `context + i`. For a causal block, use `causal_keys`.

    Args:
        context: Keys cached for each request without padding, integer `[batch]`, or an int for one.
        block: rows in the block.
        window: sliding window in Keys, or None for full attention.
        sinks: how many of the first Keys a window does not hide.

    Returns:
        int64 `[batch, block]`; on the CPU if `context` is an int.

    Raises:
        TypeError: `context` is a tensor of another dtype.
        ValueError: `context` is negative or not `[batch]`, `block < 1` or `window < 1`.
    """
    return _batch_keys("context", context, "block", block, causal=False, window=window, sinks=sinks)


def causal_keys(past: Tensor | int, rows: int, window: int | None = None, sinks: int = 0) -> Tensor:
    """Keys that each of `rows` new causal rows sees: row i sees `past + i + 1`, at most `window`.

    Rows padded on the left: pass `past - padding` as a tensor, negative where nothing is cached;
    the padded rows then count 0. Rows padded on the right take counts nobody reads.

    Args:
        past: Keys cached for each request without padding, integer `[batch]`, or an int for one.
        rows: new rows of each request.
        window: sliding window in Keys, or None for full attention.
        sinks: how many of the first Keys a window does not hide.

    Returns:
        int64 `[batch, rows]`; on the CPU if `past` is an int.

    Raises:
        TypeError: `past` is a tensor of another dtype.
        ValueError: the int `past` is negative, the tensor is not `[batch]`, `rows < 1` or
            `window < 1`.
    """
    return _batch_keys("past", past, "rows", rows, causal=True, window=window, sinks=sinks)


def ragged_keys(
    query_start: Tensor,
    total_keys: Tensor,
    rows: int,
    *,
    causal: bool,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """Keys that each row sees in a flat batch of requests with unequal rows, laid out as in vLLM.

    Args:
        query_start: first row of each request and the end of the last (`query_start_loc`), integer
            `[batch + 1]`, from 0, non-decreasing.
        total_keys: Keys of each request with its own rows (`seq_lens`), integer `[batch]`.
        rows: length of the flat batch; rows from `query_start[-1]` on are padding.
        causal: whether a row sees only Keys up to itself; otherwise every Key of its request.
        window: sliding window in Keys, or None for full attention.
        sinks: how many of the first Keys a window does not hide.

    Returns:
        int64 `[rows]`, 0 for padding.

    Raises:
        TypeError: a tensor is not of an integer dtype.
        ValueError: the shapes do not fit, `rows < 1` or `window < 1`.
    """
    _require_integers("query_start", query_start)
    _require_integers("total_keys", total_keys)
    if query_start.dim() != 1 or total_keys.dim() != 1 or len(query_start) != len(total_keys) + 1:
        raise ValueError(
            "query_start must be [batch + 1] and total_keys [batch], "
            f"got shapes {tuple(query_start.shape)} and {tuple(total_keys.shape)}"
        )
    _require_positive("rows", rows)
    row = torch.arange(rows, device=query_start.device)
    start = query_start.long()
    # Padding rows land on one request past the last, hence the extra entry.
    request = torch.searchsorted(start, row, right=True) - 1
    ahead = pad(start[1:], (0, 1))[request] - 1 - row
    upto = pad(total_keys.long(), (0, 1))[request] - ahead
    counts = _count(upto, ahead, View(causal, window, sinks))
    return torch.where(row < start[-1], counts, 0)


def mask_keys(mask: Tensor) -> Tensor:
    """Keys that each row sees according to an attention mask, whatever its pattern.

    Args: mask: `[..., rows, keys]`: bool, True where visible; or floating, added to the scores,
        where -inf and the smallest value of the mask's own dtype hide a Key. Milder penalties leave
        it visible, so a mask cast to a wider dtype than it was filled in must be made bool first.

    Returns:
        int64 `[..., rows]`.

    Raises:
        TypeError: the mask is neither bool nor floating.
    """
    if mask.is_floating_point():
        mask = mask > torch.finfo(mask.dtype).min
    elif mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be bool or floating, got {mask.dtype}: turn a 0/1 mask into bool with "
            "mask.bool()"
        )
    return mask.sum(-1)


def visible_keys(
    query: Tensor, key: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Keys that each row of a `scaled_dot_product_attention` call sees.

    query [..., rows, dim], key [..., keys, dim]; mask and causal as there: a bool mask is true
    where a Key is seen, a floating one hides where it is -inf or its dtype's smallest value; causal
    lets row i see Keys 0 to i.

    Returns int64 of as many dimensions as the Query less one, of size 1 where the count does not
    vary.
    """
    rows, count = query.shape[-2], key.shape[-2]
    if mask is not None:
        seen = mask_keys(mask.expand(*mask.shape[:-1], count))
    elif causal:
        seen = (torch.arange(rows, device=query.device) + 1).clamp(max=count)
    else:
        seen = torch.full((1,), count, device=query.device)
    return seen.view(*[1] * (query.dim() - 1 - seen.dim()), *seen.shape)


def _batch_keys(
    keys_name: str,
    cached: Tensor | int,
    rows_name: str,
    rows: int,
    *,
    causal: bool,
    window: int | None,
    sinks: int,
) -> Tensor:
    _require_positive(rows_name, rows)
    if isinstance(cached, int):
        if cached < 0:
            raise ValueError(f"{keys_name} must not be negative, got {cached}")
        cached = torch.tensor([cached])
    _require_integers(keys_name, cached)
    if cached.dim() != 1:
        raise ValueError(
            f"{keys_name} must be [batch], one count for each request, got shape "
            f"{tuple(cached.shape)}"
        )
    row = torch.arange(rows, device=cached.device)
    upto = cached.long().unsqueeze(-1) + row + 1
    return _count(upto, rows - 1 - row, View(causal, window, sinks))


def _count(upto: Tensor, ahead: Tensor, view: View) -> Tensor:
    """Visible Keys, from the Keys up to and including each row's own and those ahead of it."""
    if view.window is None:
        return upto.clamp(min=0) if view.causal else upto.clamp(min=0) + ahead
    seen = upto.clamp(min=0, max=view.window)
    if view.sinks:
        seen = seen + (upto - view.window).clamp(min=0, max=view.sinks)
    if view.causal:
        return seen
    near = ahead.clamp(max=view.window - 1)
    if view.sinks:
        # Sinks may lie ahead as well, behind what the window shows there.
        near = near + ((upto + ahead).clamp(max=view.sinks) - (upto + near)).clamp(min=0)
    return seen + near


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _require_integers(name: str, value: Tensor) -> None:
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be of an integer dtype, got {value.dtype}")
