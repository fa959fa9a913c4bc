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
    ) -> None:
        shape = (layers, batch, kv_heads, capacity, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

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
