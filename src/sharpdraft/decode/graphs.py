"""Greedy rounds of fixed shape: the same operations on the same memory at every length, and one
word from the device.

A round is two sequences of operations, draft and verify, that never ask the host: which drafts are
accepted is decided on the device, which then tells tokens and their number at once. On CUDA each
sequence is recorded as a graph, one for every power of two of Keys, and a round is two launches;
elsewhere the same code runs as it is, which is how it is tested.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..drafters.base import Drafter
from ..model.attention import FixedRows
from .rounds import Round, Stopwatch
from .sampling import broken_logits

if TYPE_CHECKING:
    from .session import Session

_FEWEST_KEYS = 512


class FixedRounds:
    """Rounds of a session. They may alternate with other rounds, rewinding, and changes of policy
    and drafter."""

    def __init__(self, session: Session) -> None:
        # The session holds its rounds, and its caches shall go when it goes.
        self._session = weakref.ref(session)
        self.device = device = session.target.device
        self.start, self.anchor = (
            torch.zeros(1, dtype=torch.long, device=device) for _ in range(2)
        )
        self.at: tuple[int, int] | None = None
        self.kind: Any = None
        self.passes: dict[Any, _Passes] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def session(self) -> Session:
        session = self._session()
        assert session is not None
        return session

    def fits(self, limit: int) -> bool:
        """Whether the next round can be one: greedy, with a whole block and room for it."""
        session = self.session
        drafter = session.drafter if session.drafting else None
        start, size = len(session.tokens) - 1, 1 if drafter is None else session.size
        room = session.cache.capacity
        if drafter is not None:
            room = min(room, session.drafts.capacity)
        return session.sampler.greedy and size <= min(limit, start) and start + size <= room

    @torch.inference_mode()
    def round(self, stop: Collection[int]) -> Round:
        """The next round; `fits` must hold."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return self._round(stop)

    def _round(self, stop: Collection[int]) -> Round:
        session = self.session
        drafter = session.drafter if session.drafting else None
        start, anchor = len(session.tokens) - 1, session.tokens[-1]
        count = 0 if drafter is None else session.size - 1
        session._catch_up()
        began = time.perf_counter()
        keys = _FEWEST_KEYS
        while keys < start + count + 1:
            keys *= 2
        # Of several drafters on one session (`lab.several`) one is chosen. Passes keep their
        # drafter, so that no other one has its id.
        who = id(drafter), getattr(drafter, "chosen", None)
        kind = (count, keys, session.policy if drafter is not None else None, who)
        if self.at != (start, anchor) or kind != self.kind:
            if drafter is not None:
                drafter.catch_up([session.drafts], [session.policy])
            if kind not in self.passes:
                self.passes[kind] = self._prepare(drafter, count, keys, start, anchor)
            self._load(start, anchor)
        passes, clock = self.passes[kind], Stopwatch(self.device)
        # Should anything go wrong, the device is no longer where it was.
        self.at, self.kind = None, kind
        passes.draft()
        clock.mark()
        passes.verify()
        *choice, accepted, numbers = passes.said.tolist()
        if not numbers:
            raise broken_logits()
        self.at = start + accepted + 1, choice[accepted]
        written = session._take(choice[: accepted + 1], stop)
        if drafter is not None:
            drafter.accept_fixed(session.drafts, [anchor, *written[:-1]])
        drafting = clock.seconds() if drafter is not None else 0.0
        whole = time.perf_counter() - began
        return Round(tuple(written), start, count, len(written) - 1, drafting, whole - drafting)

    def _load(self, start: int, anchor: int) -> None:
        self.start.fill_(start)
        self.anchor.fill_(anchor)
        self.at = start, anchor

    def _prepare(
        self, drafter: Drafter[Any] | None, count: int, keys: int, start: int, anchor: int
    ) -> _Passes:
        session, target = self.session, self.session.target
        cache, drafts = session.cache, None if drafter is None else session.drafts
        policy, taps = session.policy, () if drafter is None else session.taps
        # Keys behind the last are hidden, but memory that was never written may hold what is no
        # number.
        cache.blank()
        if drafts is not None:
            drafts.blank()
        ids = torch.zeros(count + 1, dtype=torch.long, device=target.device)
        said = torch.zeros(count + 3, dtype=torch.long, device=target.device)

        # Without `self`, which holds the passes and would be held by them.
        at, last = self.start, self.anchor

        def draft() -> None:
            ids[:1].copy_(last)
            if drafter is not None:
                ids[1:].copy_(drafter.propose_fixed(drafts, at, last, count, policy, keys))

        def verify() -> None:
            where = FixedRows(cache, at, count + 1, keys, target.rotary)
            logits, features, _ = target.run(ids[None], where, taps)
            values, choice = logits[0].max(-1)
            accepted = (choice[:-1] == ids[1:]).long().cumprod(0).sum(0, keepdim=True)
            if drafter is not None:
                drafter.observe_fixed(drafts, at, ids, features, keys)
            said.copy_(torch.cat((choice, accepted, values.isfinite().all()[None].long())))
            at.add_(accepted + 1)
            last.copy_(choice.index_select(0, accepted))

        if self.pool is None:
            return _Passes(draft, verify, said, ())
        graphs = self._record(draft, start, anchor), self._record(verify, start, anchor)
        return _Passes(graphs[0], graphs[1], said, (draft, verify))

    def _record(self, run: Callable[[], None], start: int, anchor: int) -> Callable[[], None]:
        """A CUDA graph of `run`, behind runs that choose kernels and workspaces."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._load(start, anchor)
                run()
        torch.cuda.current_stream().wait_stream(side)
        self._load(start, anchor)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            run()
        return graph.replay


@dataclass(frozen=True)
class _Passes:
    """Draft and verify, and where the second leaves its tokens, how many drafts it accepted, and
    whether logits were numbers. `recorded`: what graphs were made of, whose tensors they go on
    reading and writing."""

    draft: Callable[[], None]
    verify: Callable[[], None]
    said: Tensor
    recorded: tuple[Callable[[], None], ...]
