"""A drafter beside prompt lookup: where the text has stood before, what followed is drafted, and
else what the drafter says, whichever promises more tokens a second.

What each of both gets accepted is measured, by the length of the match, and so is the time it
takes. Neither changes what is written: verification is lossless whatever is drafted. Where tokens
are drawn, a seed shall repeat an answer, and then no clock has a say, nor any answer before.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..method.settings import DraftSettings
from ..model.causal_lm import CausalLM
from ..model.placement import Placement
from .base import Draft, DraftCache, Drafter, MassProbe, Pick, likeliest
from .lookup import SHORTEST, Lookup, LookupCache, warranted

# The shortest match of each bucket, and what is accepted there before anything is measured: by
# lookup as on the recorded sessions of SmolLM2, by a drafter more where text repeats itself.
_BUCKETS = (0, SHORTEST, 3, 4, 6, 8, 12)
_LOOKED_UP = (0.0, 1.1, 1.7, 2.5, 3.3, 5.2, 5.8)
_DRAFTED = (0.8, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5)
# That weighs so many rounds; so many are remembered; once in so many the other may be tried, where
# it could have so many tokens more accepted as long as it was never tried.
_TRUST, _MEMORY, _TRIES, _DOUBT = 4, 32, 16, 3.0
# A drafter's passes, in passes of the target.
_COST = 0.25


class Estimates:
    """Tokens accepted of lookup (True) and of the drafter (False), by bucket: means that start at
    what is expected and forget what is long ago."""

    def __init__(self) -> None:
        self.means = {True: list(_LOOKED_UP), False: list(_DRAFTED)}
        self.tried = {True: [0.0] * len(_BUCKETS), False: [0.0] * len(_BUCKETS)}

    def learn(self, lookup: bool, bucket: int, accepted: int) -> None:
        means, tried = self.means[lookup], self.tried[lookup]
        tried[bucket] = min(tried[bucket] + 1, _MEMORY)
        # What was not tried for long is no longer known: the text may have become another.
        self.tried[not lookup][bucket] *= 1 - 1 / _MEMORY
        means[bucket] += (accepted - means[bucket]) / (_TRUST + tried[bucket])

    def looks_up(self, bucket: int, cost: float) -> bool:
        """Whether lookup promises more tokens a second, the drafter's passes costing so many of the
        target's. Where the other could be better, for all that is known, it is tried now and
        then."""
        passes = {True: 1.0, False: 1 + cost}

        def value(lookup: bool, doubt: float = 0.0) -> float:
            return (1 + self.means[lookup][bucket] + doubt) / passes[lookup]

        best = value(True) >= value(False)
        tried, others = self.tried[best][bucket], self.tried[not best][bucket]
        doubt = max(1.0, _DOUBT / math.sqrt(1 + others))
        return best != (others * _TRIES < tried and value(not best, doubt) > value(best))


@dataclass(frozen=True)
class _Asked:
    """What was drafted behind the first `length` tokens, and when; drafting: seconds of the
    drafter's passes, None where it had none."""

    length: int
    lookup: bool
    bucket: int
    estimates: Estimates
    drafting: float | None
    since: float


class MixedCache:
    """A drafter's cache and the index of the text, which hold the same tokens, and what is known of
    both."""

    def __init__(self, own: DraftCache, text: LookupCache) -> None:
        self.own, self.text = own, text
        self.estimates = Estimates()
        # Of the answer that is drawn now.
        self.drawn = Estimates()
        self.asked: _Asked | None = None
        # Seconds of the last few; a median, as others use the machine too.
        self.drafting, self.verifying = deque[float](maxlen=9), deque[float](maxlen=9)

    @property
    def length(self) -> int:
        return self.own.length

    @length.setter
    def length(self, length: int) -> None:
        self.own.length = self.text.length = length

    @property
    def capacity(self) -> int:
        return self.text.capacity

    @property
    def limit(self) -> int | None:
        return self.own.limit

    def reads(self, start: int, end: int) -> None:
        self.own.reads(start, end)
        self.drawn = Estimates()

    def rewind(self, length: int) -> None:
        self.own.rewind(length)
        self.text.length = self.own.length

    def blank(self) -> None:
        self.own.blank()

    @contextmanager
    def borrowed(self, start: int, rows: int) -> Iterator[None]:
        with self.own.borrowed(start, rows), self.text.borrowed(start, rows):
            try:
                yield
            finally:
                # Nobody will say what was accepted.
                self.asked = None

    @property
    def cost(self) -> float:
        """The drafter's passes in passes of the target."""
        if not self.drafting or not self.verifying:
            return _COST
        return median(self.drafting) / median(self.verifying)

    def learn(self, accepted: int) -> None:
        """So many of the drafts were right."""
        asked, self.asked = self.asked, None
        if asked is None or asked.length != self.length:
            return
        asked.estimates.learn(asked.lookup, asked.bucket, accepted)
        self.verifying.append(time.perf_counter() - asked.since)
        if asked.drafting is not None:
            self.drafting.append(asked.drafting)


class Mixed:
    """A drafter and prompt lookup as one drafter of a target. Settings are the drafter's."""

    static = False

    def __init__(self, drafter: Drafter[Any], target: CausalLM) -> None:
        self.drafter, self.lookup = drafter, Lookup(target)
        self.taps, self.views = drafter.taps, drafter.views
        self.num_drafts = max(drafter.num_drafts, self.lookup.num_drafts)
        self.max_drafts = max(drafter.max_drafts, self.lookup.max_drafts)

    def new_cache(self, capacity: int) -> MixedCache:
        return MixedCache(self.drafter.new_cache(capacity), self.lookup.new_cache(capacity))

    def append(
        self,
        at: Placement,
        caches: Sequence[MixedCache],
        tokens: Tensor,
        counts: Sequence[int],
        features: Sequence[Tensor],
    ) -> None:
        """Let both take in tokens; see `base.Drafter`."""
        self.drafter.append(at, [cache.own for cache in caches], tokens, counts, features)

    def commit(
        self, at: Placement, caches: Sequence[MixedCache], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Count verified tokens, which say what was right of the drafts; see `base.Drafter`."""
        for cache, own in zip(caches, tokens, strict=True):
            cache.learn(len(own) - 1)
        self.drafter.commit(at, [cache.own for cache in caches], tokens)
        self.lookup.commit(at, [cache.text for cache in caches], tokens)

    def catch_up(self, caches: Sequence[MixedCache], settings: Sequence[DraftSettings]) -> None:
        """See `base.Drafter`; lookup is never behind."""
        self.drafter.catch_up([cache.own for cache in caches], settings)

    @torch.inference_mode()
    def propose(
        self,
        at: Placement,
        caches: Sequence[MixedCache],
        anchors: Tensor,
        count: int,
        settings: Sequence[DraftSettings],
        picks: Sequence[Pick],
        probe: MassProbe | None = None,
    ) -> list[Draft]:
        """Draft by lookup or by the drafter, request by request; see `base.Drafter`. The drafter's
        passes are for those alone that need it."""
        began = time.perf_counter()
        drafts = [Draft.chain(anchors[:0])] * len(caches)
        asked: dict[int, tuple[bool, int, Estimates]] = {}
        drafting: dict[int, list[int]] = {}
        each = zip(caches, anchors.tolist(), settings, picks, strict=True)
        for i, (cache, anchor, own, pick) in enumerate(each):
            match = cache.text.match(anchor)
            bucket = bisect_right(_BUCKETS, match) - 1
            random = pick is not likeliest
            known, cost = (cache.drawn, _COST) if random else (cache.estimates, cache.cost)
            most = self._most(cache, count, own)
            looks_up = match >= SHORTEST and (not most or known.looks_up(bucket, cost))
            if looks_up:
                sure = warranted(match, min(count, own.drafts or self.lookup.num_drafts))
                drafts[i] = self.lookup.draft(cache.text, sure)
            elif most:
                drafting.setdefault(most, []).append(i)
            # Where an answer ends, fewer are asked for than could be right.
            if (looks_up or most) and count == (own.drafts or self.num_drafts):
                asked[i] = looks_up, bucket, known
        for most, group in drafting.items():
            proposed = self.drafter.propose(
                at,
                [caches[i].own for i in group],
                anchors if len(group) == len(caches) else anchors[group],
                most,
                [settings[i] for i in group],
                [picks[i] for i in group],
                probe,
            )
            for i, draft in zip(group, proposed, strict=True):
                drafts[i] = draft
        now = time.perf_counter()
        for i, cache in enumerate(caches):
            cache.asked = None
            if i in asked:
                seconds = None if asked[i][0] else now - began
                cache.asked = _Asked(cache.length, *asked[i], seconds, now)
        return drafts

    def _most(self, cache: MixedCache, count: int, settings: DraftSettings) -> int:
        """How many of `count` tokens the drafter would draft: by default as many as alone, and as
        far as it has positions."""
        most = min(settings.drafts or self.drafter.num_drafts, self.drafter.max_drafts)
        return max(min(count, most, cache.own.capacity - cache.length), 0)
