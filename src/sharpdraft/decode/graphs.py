"""Greedy rounds on static rows: the same operations on the same memory at every length.

A round is the steps of `step`, of which draft and verify never ask the host for anything: where the
next rows stand is counted on the device. On CUDA both are recorded as graphs, one pair for every
power of two of Keys, and a round is two launches; elsewhere the same code runs as it is, which is
how it is tested.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..drafters.base import Draft
from ..model.placement import Static
from .rounds import Round, Stopwatch
from .step import Verified, accept, commit, draft, verify

if TYPE_CHECKING:
    from .session import Session

_FEWEST_KEYS = 512


class StaticRounds:
    """Rounds of a session. They may alternate with other rounds, rewinding, and changes of arm."""

    def __init__(self, session: Session) -> None:
        # The session holds its rounds, and its caches shall go when it goes.
        self.session: Session = weakref.proxy(session)
        self.device = device = session.target.device
        self.start, self.anchor = (
            torch.zeros(1, dtype=torch.long, device=device) for _ in range(2)
        )
        self.at: tuple[int, int] | None = None
        self.kind: Any = None
        self.passes: dict[Any, _Passes] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def fits(self, limit: int) -> bool:
        """Whether the next round can be one: greedy, with all its drafts and room for them, and
        rotary positions that do not change with the length of the text."""
        session = self.session
        start, rows = len(session.tokens) - 1, session.num_drafts + 1
        caches = [session.cache] if session.drafter is None else [session.cache, session.drafts]
        if any(cache.limit is not None for cache in caches):
            return False
        # Lookup asks the host for the text, which a graph cannot.
        if session.drafter is not None and not session.drafter.static:
            return False
        room = min(cache.capacity for cache in caches)
        return session.sampler.greedy and rows <= min(limit, start) and start + rows <= room

    @torch.inference_mode()
    def round(self, stop: Collection[int]) -> Round:
        """The next round; `fits` must hold."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return self._round(stop)

    def _round(self, stop: Collection[int]) -> Round:
        session = self.session
        start, anchor = len(session.tokens) - 1, session.tokens[-1]
        session.read_up()
        keys = _FEWEST_KEYS
        while keys < start + session.num_drafts + 1:
            keys *= 2
        # Passes keep their drafter, so that no other one has its id.
        kind = (session.num_drafts, keys, session.settings, id(session.drafter))
        if self.at != (start, anchor) or kind != self.kind:
            session.catch_up()
            if kind not in self.passes:
                self.passes[kind] = self._prepare(keys, start, anchor)
            self._load(start, anchor)
        passes = self.passes[kind]
        clock = Stopwatch(self.device)
        # Should anything go wrong, the device is no longer where it was.
        self.at, self.kind = None, kind
        passes.draft()
        clock.mark()
        passes.verify()
        drafts, verified = passes.drafts, passes.verified
        (accepted,) = accept([session.sampler], [session.tokens], drafts, verified)
        self.at = start + len(accepted), accepted[-1]
        asked = [session.num_drafts]
        rounds = commit(passes.static, [session], verified, [accepted], asked, [stop])
        return clock.times_of(rounds)[0]

    def _load(self, start: int, anchor: int) -> None:
        self.start.fill_(start)
        self.anchor.fill_(anchor)
        self.at = start, anchor

    def _prepare(self, keys: int, start: int, anchor: int) -> _Passes:
        session = self.session
        # Keys behind the last are hidden, but memory that was never written may hold what is no
        # number.
        session.cache.blank()
        if session.drafter is not None:
            session.drafts.blank()
        passes = _Passes(session, Static(self.start, keys), self.anchor)
        if self.pool is not None:
            passes.record("draft", self.pool, lambda: self._load(start, anchor))
            passes.record("verify", self.pool, lambda: self._load(start, anchor))
        return passes


class _Passes:
    """Draft and verify of one shape, and where they leave what they find. `keys`: see
    `StaticRows`."""

    drafts: list[Draft]
    verified: Verified

    def __init__(self, session: Session, static: Static, anchor: Tensor) -> None:
        self.session, self.static, self.anchor = session, static, anchor
        self.draft: Callable[[], None] = self._draft
        self.verify: Callable[[], None] = self._verify

    def _draft(self) -> None:
        session = self.session
        self.drafts = draft(self.static, [session], self.anchor, [session.num_drafts])

    def _verify(self) -> None:
        session = self.session
        self.verified = found = verify(self.static, [session], self.anchor, self.drafts)
        if session.drafter is not None:
            cache, counts = [session.drafts], [len(found.ids)]
            session.drafter.append(self.static, cache, found.ids, counts, found.features)
        # The next round stands behind what is accepted.
        accepted = (found.best[:-1] == found.ids[1:]).long().cumprod(0).sum(0, keepdim=True)
        self.static.start.add_(accepted + 1)
        self.anchor.copy_(found.best.index_select(0, accepted))

    def record(self, name: str, pool: Any, load: Callable[[], None]) -> None:
        """Make a CUDA graph of draft or verify, behind runs that choose kernels and workspaces."""
        run: Callable[[], None] = getattr(self, f"_{name}")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                load()
                run()
        torch.cuda.current_stream().wait_stream(side)
        load()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        setattr(self, name, graph.replay)
