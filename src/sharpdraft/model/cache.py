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

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys/values [batch, kv_heads, rows, head_dim] at `start`; return views of all up to
        their end."""
        end = start + keys.shape[2]
        layer_keys, layer_values = self.keys[layer], self.values[layer]
        layer_keys[:, :, start:end] = keys
        layer_values[:, :, start:end] = values
        return layer_keys[:, :, :end], layer_values[:, :, :end]

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
