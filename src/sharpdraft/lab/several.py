"""Several drafters of one target on one session, so that they are compared on one prefix that is
read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..drafters.base import DraftCache, Drafter, MassProbe, Pick
from ..method.scale import Policy


class Several:
    """A drafter made of several: one drafts at a time, or none, and then all read along.

    While one is chosen the others read nothing, so that its time is its own; they catch up from
    where they were.
    """

    def __init__(self, drafters: Mapping[str, Drafter[Any]]) -> None:
        self.drafters = dict(drafters)
        self.taps = tuple(sorted({tap for each in drafters.values() for tap in each.taps}))
        self.chosen: str | None = None

    @property
    def block_size(self) -> int:
        return (
            self.drafters[self.chosen].block_size
            if self.chosen
            else min(d.block_size for d in self._reading())
        )

    @property
    def longest_block(self) -> int:
        return min(each.longest_block for each in self._reading())

    def _reading(self) -> Sequence[Drafter[Any]]:
        return list(self.drafters.values()) if self.chosen is None else [self.drafters[self.chosen]]

    def new_cache(self, capacity: int) -> SeveralCaches:
        return SeveralCaches(
            self, {name: each.new_cache(capacity) for name, each in self.drafters.items()}
        )

    def observe(
        self,
        caches: Sequence[SeveralCaches],
        tokens: Sequence[Sequence[int]],
        features: Sequence[Tensor],
    ) -> None:
        states = dict(zip(self.taps, features, strict=True))
        for name, drafter in self.drafters.items():
            if self.chosen in (None, name):
                own = [cache.parts[name] for cache in caches]
                drafter.observe(own, tokens, [states[tap] for tap in drafter.taps])

    def catch_up(self, caches: Sequence[SeveralCaches], policies: Sequence[Policy | None]) -> None:
        if self.chosen is not None:
            self.drafters[self.chosen].catch_up(
                [cache.parts[self.chosen] for cache in caches], policies
            )

    def propose(
        self,
        caches: Sequence[SeveralCaches],
        anchors: Sequence[int],
        count: int,
        policies: Sequence[Policy | None],
        picks: Sequence[Pick],
        probe: MassProbe | None = None,
    ) -> Tensor:
        assert self.chosen is not None
        own = [cache.parts[self.chosen] for cache in caches]
        return self.drafters[self.chosen].propose(own, anchors, count, policies, picks, probe)

    def propose_fixed(
        self,
        cache: SeveralCaches,
        start: Tensor,
        anchor: Tensor,
        count: int,
        policy: Policy | None,
        keys: int,
    ) -> Tensor:
        assert self.chosen is not None
        own = cache.parts[self.chosen]
        return self.drafters[self.chosen].propose_fixed(own, start, anchor, count, policy, keys)

    def observe_fixed(
        self,
        cache: SeveralCaches,
        start: Tensor,
        tokens: Tensor,
        features: Sequence[Tensor],
        keys: int,
    ) -> None:
        assert self.chosen is not None
        states, drafter = dict(zip(self.taps, features, strict=True)), self.drafters[self.chosen]
        own = cache.parts[self.chosen]
        drafter.observe_fixed(own, start, tokens, [states[tap] for tap in drafter.taps], keys)

    def accept_fixed(self, cache: SeveralCaches, tokens: Sequence[int]) -> None:
        assert self.chosen is not None
        self.drafters[self.chosen].accept_fixed(cache.parts[self.chosen], tokens)


class SeveralCaches:
    """The caches of several drafters; `length` is what those that read have all seen."""

    def __init__(self, of: Several, parts: Mapping[str, DraftCache]) -> None:
        self.of, self.parts = of, parts

    @property
    def length(self) -> int:
        return min(
            part.length for name, part in self.parts.items() if self.of.chosen in (None, name)
        )

    @length.setter
    def length(self, length: int) -> None:
        for part in self.parts.values():
            part.length = min(part.length, length)

    @property
    def capacity(self) -> int:
        return min(part.capacity for part in self.parts.values())

    def blank(self) -> None:
        for part in self.parts.values():
            part.blank()

    def borrowed(self, start: int, rows: int) -> AbstractContextManager[None]:
        assert self.of.chosen is not None
        return self.parts[self.of.chosen].borrowed(start, rows)
