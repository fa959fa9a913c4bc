"""Where the rows of a pass stand: behind what caches hold, or where only the device knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .cache import KVCache
from .rotary import Rotary
from .rows import RaggedRows
from .static_rows import StaticRows


class Ragged:
    """Places rows behind what the caches hold."""

    def rows(
        self, caches: Sequence[KVCache], counts: Sequence[int], rotary: Rotary, offset: int = 0
    ) -> RaggedRows:
        """So many rows of each request, `offset` slots behind its cache's length."""
        return RaggedRows(caches, [cache.length + offset for cache in caches], counts, rotary)


@dataclass(frozen=True)
class Static:
    """Places rows of one request where only the device knows. start: int64 [1]. keys: as in
    `StaticRows`."""

    start: Tensor
    keys: int

    def rows(
        self, caches: Sequence[KVCache], counts: Sequence[int], rotary: Rotary, offset: int = 0
    ) -> StaticRows:
        """So many rows of the one request, `offset` slots behind `start`."""
        (cache,), (count,) = caches, counts
        return StaticRows(cache, self.start + offset, count, self.keys, rotary)


Placement = Ragged | Static
