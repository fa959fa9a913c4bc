"""What an EAGLE drafter keeps of the verified tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..model.cache import KVCache


class PairCache(KVCache):
    """Keys and Values of pairs (state, next token), and the states and tokens themselves.

    The last state of all waits for its token, so that one pair fewer is cached than there are
    tokens.
    """

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        hidden: int,
        capacity: int,
        drafts: int,
        dtype: torch.dtype,
        device: torch.device,
        limit: int | None = None,
    ) -> None:
        self.pairs = 0
        room = capacity + drafts
        super().__init__(1, kv_heads, head_dim, room, dtype=dtype, device=device, limit=limit)
        self.states = torch.empty(capacity, hidden, dtype=dtype, device=device)
        self.tokens = torch.empty(capacity, dtype=torch.long, device=device)

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        # Where a rolled-back text goes on otherwise, the pairs behind are others.
        self._length, self.pairs = length, min(self.pairs, max(length - 1, 0))

    @contextmanager
    def borrowed(self, start: int, rows: int) -> Iterator[None]:
        """Stand at `start` for a while; pairs that are written over are made again from the
        states."""
        seen = self.length
        self.length = start
        try:
            yield
        finally:
            self.length = seen
