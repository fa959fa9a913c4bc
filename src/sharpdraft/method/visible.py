"""How many Keys each Query row sees: the N that a policy reads (SharpDraft, arXiv 2610.05106).

A row's count is the persistent context plus the part of the current draft block it sees; masked and
padded positions do not count, nor does a learned attention sink, which is a term of the softmax and
no Key. Key positions of a request run from 0; a row at position p sees, when causal, the Keys at
positions up to p; when not causal, all of them. A window of w drops the Keys with `p - position >=
w`: w Keys up to and including the row's own stay, and Keys ahead of a non-causal row always stay.
An engine that also cuts off Keys ahead is counted with `causal_keys`, and any other pattern with
`mask_keys` on its mask.

Everything returns int64 on the device of its tensors. Python integers are checked; values inside
tensors are not, as reading them would make the host wait for the device.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def block_keys(context: Tensor | int, block: int, window: int | None = None) -> Tensor:
    """Keys that each row of a non-causal draft block sees (DFlash): `context + block`, fewer with a
    window.

    Row i of the block sits at position `context + i`. For a causal block, use `causal_keys`.

    Args: context: Keys cached for each request without padding, integer `[batch]`, or an int for
        one request. block: rows in the block. window: sliding window in Keys, or None for full
        attention.

    Returns:
        int64 `[batch, block]`; on the CPU if `context` is an int.

    Raises:
        TypeError: `context` is a tensor of another dtype.
        ValueError: `context` is negative or not `[batch]`, `block < 1` or `window < 1`.
    """
    return _batch_keys("context", context, "block", block, causal=False, window=window)


def causal_keys(past: Tensor | int, rows: int, window: int | None = None) -> Tensor:
    """Keys that each of `rows` new causal rows sees: row i sees `past + i + 1`, at most `window`.

    Rows padded on the left: pass `past - padding` as a tensor, negative where nothing is cached;
    the padded rows then count 0. Rows padded on the right take counts nobody reads.

    Args: past: Keys cached for each request without padding, integer `[batch]`, or an int for one
        request. rows: new rows of each request. window: sliding window in Keys, or None for full
        attention.

    Returns:
        int64 `[batch, rows]`; on the CPU if `past` is an int.

    Raises: TypeError: `past` is a tensor of another dtype. ValueError: the int `past` is negative,
        the tensor is not `[batch]`, `rows < 1` or `window < 1`.
    """
    return _batch_keys("past", past, "rows", rows, causal=True, window=window)


def ragged_keys(
    query_start: Tensor, total_keys: Tensor, rows: int, *, causal: bool, window: int | None = None
) -> Tensor:
    """Keys that each row sees in a flat batch of requests with unequal rows, laid out as in vLLM.

    Args:
        query_start: first row of each request and the end of the last (`query_start_loc`), integer
            `[batch + 1]`, from 0, non-decreasing.
        total_keys: Keys of each request with its own rows (`seq_lens`), integer `[batch]`.
        rows: length of the flat batch; rows from `query_start[-1]` on are padding.
        causal: whether a row sees only Keys up to itself; otherwise every Key of its request.
        window: sliding window in Keys, or None for full attention.

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
    counts = _count(pad(total_keys.long(), (0, 1))[request] - ahead, ahead, causal, window)
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
            f"mask must be bool or floating, got {mask.dtype}: turn a 0/1 mask into bool with mask.bool()"
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
) -> Tensor:
    _require_positive(rows_name, rows)
    if isinstance(cached, int):
        if cached < 0:
            raise ValueError(f"{keys_name} must not be negative, got {cached}")
        cached = torch.tensor([cached])
    _require_integers(keys_name, cached)
    if cached.dim() != 1:
        raise ValueError(
            f"{keys_name} must be [batch], one count for each request, got shape {tuple(cached.shape)}"
        )
    row = torch.arange(rows, device=cached.device)
    return _count(cached.long().unsqueeze(-1) + row + 1, rows - 1 - row, causal, window)


def _count(upto: Tensor, ahead: Tensor, causal: bool, window: int | None) -> Tensor:
    """Visible Keys, from the Keys up to and including each row's own and those ahead of it."""
    if window is not None:
        _require_positive("window", window)
    seen = upto.clamp(min=0, max=window)
    return seen if causal else seen + ahead


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _require_integers(name: str, value: Tensor) -> None:
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be of an integer dtype, got {value.dtype}")
