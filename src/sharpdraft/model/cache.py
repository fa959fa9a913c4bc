"""Preallocated Key/Value memory: writing is a copy into place, rolling back is a length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class KVCache:
    """Keys and Values of every layer, [layers, batch, kv_heads, capacity, head_dim], and how many
    are valid.

    `length` is the number of Keys that every row of the batch holds. Setting it to a smaller number
    rolls back: what lies beyond is overwritten by the next write.

    `limit` is that of the rotary positions that the Keys are turned to (see `Rotary`). `since` is
    then the first position that is turned as in a longer text: where such a text began to be read,
    and behind the limit all are. None: nobody says what is read together, and each pass is by
    itself.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        limit: int | None = None,
    ) -> None:
        shape = (layers, batch, kv_heads, capacity, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0
        self.limit = limit
        self.since: int | None = None

    def reads(self, start: int, end: int) -> None:
        """The text from position `start` up to `end` is known before any of it is read."""
        if self.limit is not None:
            since = self.limit if self.since is None else self.since
            self.since = min(since, start) if end > self.limit else since

    def rewind(self, length: int) -> None:
        """Roll back to a text of `length` tokens, of which the last is to be read again, and all
        those that were turned as in a longer text than it now is."""
        kept = max(length - 1, 0)
        if self.limit is not None and self.since is not None and length <= self.limit:
            kept, self.since = min(kept, self.since), self.limit
        self.length = min(self.length, kept)

    def at(self, layer: int | slice) -> tuple[Tensor, Tensor]:
        """Keys and Values of one layer, [batch, kv_heads, capacity, head_dim]; of a slice of
        layers, for a batch of one, [layers, kv_heads, capacity, head_dim]."""
        if isinstance(layer, slice):
            return self.keys[layer, 0], self.values[layer, 0]
        return self.keys[layer], self.values[layer]

    def write(
        self, layer: int | slice, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put keys and values, of a shape as `at` returns them, into the slots from `start` on;
        return views of all up to their end."""
        end = start + keys.shape[2]
        all_keys, all_values = self.at(layer)
        all_keys[:, :, start:end] = keys
        all_values[:, :, start:end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def blank(self) -> None:
        """Make numbers of the memory behind the valid Keys, which nobody wrote: for who reads and
        then hides it."""
        for memory in (self.keys, self.values):
            memory[..., self.length :, :].zero_()

    @contextmanager
    def borrowed(self, start: int, rows: int) -> Iterator[None]:
        """Stand at `start` for a while, free to write `rows` rows from there; all is as before
        afterwards."""
        seen, place = self.length, slice(start, start + rows)
        kept = self.keys[..., place, :].clone(), self.values[..., place, :].clone()
        self.length = start
        try:
            yield
        finally:
            self.keys[..., place, :], self.values[..., place, :] = kept
            self.length = seen
