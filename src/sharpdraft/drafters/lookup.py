"""Prompt lookup: the text's own continuation, where its end has stood before. No model.

The longest earlier occurrence of the last tokens, the anchor included, is looked for, the latest
one among equally long ones, and what followed it is drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..method.settings import DraftSettings
from ..method.visible import View
from ..model.causal_lm import CausalLM
from ..model.placement import Placement
from .base import Draft, MassProbe, Pick
from .registry import MOST_DRAFTS
from .suffixes import Suffixes

SHORTEST = 2
"""A match of fewer tokens is none."""
_SURE = 8
DRAFTS = 7
"""As many tokens as are drafted by default."""


def warranted(match: int, count: int) -> int:
    """How many of `count` tokens to draft behind a match of so many: those that are right at least
    about once in five times, as measured on the recorded sessions of SmolLM2."""
    if match < SHORTEST:
        return 0
    return count if match >= _SURE else min(count, 2 * match - 1)


class LookupCache:
    """The verified tokens, and the index of them.

    The index may hold more than `length` tokens, of which nothing is drafted: those that it was
    rolled back from, or the anchor. When they come again they are known, and when others do, they
    are taken out.
    """

    limit: int | None = None

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.index = Suffixes()

    def reads(self, start: int, end: int) -> None:
        """Nothing depends on it."""

    def rewind(self, length: int) -> None:
        self.length = min(self.length, max(length - 1, 0))

    def blank(self) -> None:
        """There is no memory that was never written."""

    @contextmanager
    def borrowed(self, start: int, rows: int) -> Iterator[None]:
        """Stand at `start` for a while; what another anchor took out of the index is put back."""
        seen, tail, cuts = self.length, self.index.tokens[start : self.length], self.index.cuts
        self.length = start
        try:
            yield
        finally:
            if self.index.cuts != cuts:
                self.index.put(start, tail)
            self.length = seen

    def take(self, tokens: Sequence[int]) -> None:
        """Count verified tokens."""
        self.index.put(self.length, tokens)
        self.length += len(tokens)

    def match(self, anchor: int) -> int:
        """How many tokens up to the anchor, itself included, have stood somewhere before."""
        self.index.put(self.length, [anchor])
        return self.index.lengths[self.length]

    def continued(self, count: int) -> list[int]:
        """What followed there, behind the anchor that `match` was told; where that runs into the
        end of the text, it goes on through what it gave already."""
        index, first = self.index, self.index.ends[self.length] + 1
        known = index.tokens[first : min(first + count, self.length + 1)].tolist()
        return [known[k % len(known)] for k in range(count)]


class Lookup:
    """Prompt lookup as a drafter of a target. It has no attention: settings that scale Queries or
    hide Keys are refused."""

    taps: tuple[int, ...] = ()
    views: tuple[View, ...] = ()
    static = False

    def __init__(self, target: CausalLM, num_drafts: int = DRAFTS) -> None:
        """num_drafts: tokens drafted behind a long match."""
        self.device = target.device
        self.num_drafts, self.max_drafts = num_drafts, MOST_DRAFTS

    def new_cache(self, capacity: int) -> LookupCache:
        return LookupCache(capacity + MOST_DRAFTS)

    def append(
        self,
        at: Placement,
        caches: Sequence[LookupCache],
        tokens: Tensor,
        counts: Sequence[int],
        features: Sequence[Tensor] = (),
    ) -> None:
        """Nothing is kept of what may be refused; see `base.Drafter`."""

    def commit(
        self, at: Placement, caches: Sequence[LookupCache], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Take in verified tokens; see `base.Drafter`."""
        for cache, own in zip(caches, tokens, strict=True):
            cache.take(own)

    def catch_up(self, caches: Sequence[LookupCache], settings: Sequence[DraftSettings]) -> None:
        """Nothing is left to do."""

    def propose(
        self,
        at: Placement,
        caches: Sequence[LookupCache],
        anchors: Tensor,
        count: int,
        settings: Sequence[DraftSettings],
        picks: Sequence[Pick],
        probe: MassProbe | None = None,
    ) -> list[Draft]:
        """Draft up to `count` tokens behind each anchor, fewer behind a short match and none
        without one; see `base.Drafter`. Nothing is drawn: each token is proposed for certain."""
        pairs = zip(caches, anchors.tolist(), strict=True)
        return [self.draft(cache, warranted(cache.match(anchor), count)) for cache, anchor in pairs]

    def draft(self, cache: LookupCache, count: int) -> Draft:
        """The draft of so many tokens behind the anchor that the cache's `match` was told."""
        tokens = cache.continued(count) if count else []
        return Draft.chain(torch.tensor(tokens, dtype=torch.long, device=self.device))
