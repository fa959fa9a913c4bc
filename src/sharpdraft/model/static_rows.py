"""New rows where only the device knows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import SharpDraftError
from ..method.scale import Policy, as_gain
from ..method.visible import View
from .cache import KVCache
from .rotary import Rotary
from .rows import Probe, Rows

# Keys that one thread block of a GPU mixes.
_CHUNK = 256


class StaticRows(Rows):
    """A fixed number of rows of one request in slots, which are their positions, that only the
    device knows, over a fixed number of Keys of which a mask hides those behind: the same
    operations on the same memory at every length, as a CUDA graph needs them.

    at: the rows' slots, int64 [rows].
    """

    def __init__(self, cache: KVCache, start: Tensor, rows: int, keys: int, rotary: Rotary) -> None:
        """start: slot of the first row, int64 [1]; keys: how many to attend over, at least up to
        the last row.

        Raises SharpDraftError for rotary positions that change with the length of a text, which
        the host alone knows.
        """
        if rotary.limit is not None:
            raise SharpDraftError(
                "rotary positions of type 'longrope' have no static rows: use Ragged ones"
            )
        self.cache, self.start, self.rows = cache, start, rows
        self.keys = min(keys, cache.capacity)
        self.at = start + torch.arange(rows, device=start.device)
        self.cos, self.sin = rotary.cos[self.at], rotary.sin[self.at]
        self._seen: dict[View, tuple[Tensor | None, Tensor]] = {}

    def write(self, layer: int | slice, keys: Tensor, values: Tensor) -> None:
        for memory, own in zip(self.cache.at(layer), (keys, values), strict=True):
            memory.index_copy_(2, self.at, own.to(memory.dtype))

    def _gain(self, policies: Sequence[Policy | None], view: View) -> Tensor:
        (policy,) = policies
        assert policy is not None
        return as_gain(policy.gain(view.count(self.start, self.rows)))

    def _seen_of(self, view: View) -> tuple[Tensor | None, Tensor]:
        """Slots that are read, None for all of them, and which of these each row does not see."""
        if view not in self._seen:
            slots = self._slots(view)
            visible = view.sees(self.at, self.keys if slots is None else slots)
            if slots is not None and view.sinks:
                # Where the window reaches the sinks, they are there twice.
                visible[:, : view.sinks] &= slots[: view.sinks] < slots[view.sinks]
            self._seen[view] = slots, ~visible
        return self._seen[view]

    def _slots(self, view: View) -> Tensor | None:
        """Of a window's rows alone those slots that they may see, as many at every length."""
        if view.window is None or view.sinks + view.window - 1 + self.rows >= self.keys:
            return None
        first = (self.start - view.window + 1).clamp(min=0)
        near = first + torch.arange(view.window - 1 + self.rows, device=first.device)
        return torch.cat((torch.arange(view.sinks, device=first.device), near))

    def _attend(self, layer: int, query: Tensor, view: View, probe: Probe | None) -> Tensor:
        all_keys, all_values = (memory[0, :, : self.keys] for memory in self.cache.at(layer))
        slots, hidden = self._seen_of(view)
        if slots is not None:
            all_keys, all_values = all_keys[:, slots], all_values[:, slots]
        heads, rows, dim = query.shape[1:]
        kv_heads, count = all_keys.shape[:2]
        group = heads // kv_heads
        query = query[0].reshape(kv_heads, group * rows, dim).to(all_keys.dtype)
        scores = _float_product(query, all_keys.transpose(1, 2)) / math.sqrt(dim)
        shares = scores.masked_fill(hidden.repeat(group, 1), -torch.inf).softmax(-1)
        shares = shares.to(all_values.dtype)
        # Few heads would leave most of a GPU idle: the Keys are mixed in chunks, which are then
        # added up.
        chunk = _CHUNK if count % _CHUNK == 0 else count
        chunks = shares.unflatten(-1, (-1, chunk)).transpose(1, 2)
        mixed = (chunks @ all_values.unflatten(1, (-1, chunk))).float().sum(1)
        return mixed.view(heads, rows, dim).transpose(0, 1).reshape(1, rows, -1).to(query.dtype)


def _float_product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product in float32 of operands in any dtype, without copies of them where the device
    can."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
