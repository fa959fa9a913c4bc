"""Greedy rounds of fixed shape: the same operations on the same memory at every length, and one word from the device.

A round is two sequences of operations, draft and verify, that never ask the host: which drafts are accepted is decided
on the device, which then tells tokens and their number at once. On CUDA each sequence is recorded as a graph, one for
every power of two of Keys, and a round is two launches; elsewhere the same code runs as it is, which is how it is
tested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention import FixedRows
from ..drafters.family import Drafter
from .sampling import broken_logits

if TYPE_CHECKING:
    from .loop import Round, Session

_FEWEST_KEYS = 512


class FixedRounds:
    """Rounds of a session. They may alternate with other rounds, rewinding, and changes of policy and drafter."""

    def __init__(self, session: Session) -> None:
        self.session = session
        device = session.target.device
        self.start, self.anchor = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        self.at: tuple[int, int] | None = None
        self.passes: dict[Any, tuple[Callable[[], None], Callable[[], None], Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

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
        from .loop import Round

        session = self.session
        drafter = session.drafter if session.drafting else None
        start, anchor = len(session.tokens) - 1, session.tokens[-1]
        count = 0 if drafter is None else session.size - 1
        if session.cache.length < start or (drafter is not None and session.drafts.length < start):
            session._feed(start)
        began = time.perf_counter()
        if drafter is not None:
            drafter.catch_up([session.drafts], [session.policy])
        keys = _FEWEST_KEYS
        while keys < start + count + 1:
            keys *= 2
        # Of several drafters on one session (`lab.several`) one is chosen.
        who = id(drafter), getattr(drafter, "chosen", None)
        kind = (count, keys, session.policy if drafter is not None else None, who)
        if kind not in self.passes:
            self.passes[kind] = self._prepare(drafter, count, keys, start, anchor)
            self.at = None
        if self.at != (start, anchor):
            self._load(start, anchor)
        draft, verify, said = self.passes[kind]
        clock = Stopwatch(session.target.device)
        draft()
        clock.mark()
        verify()
        *choice, accepted, numbers = said.tolist()
        if not numbers:
            raise broken_logits()
        self.at = start + accepted + 1, choice[accepted]
        written = choice[: accepted + 1]
        for i, token in enumerate(written):
            if token in stop:
                written = written[: i + 1]
                break
        session.tokens.extend(written)
        session.cache.length = start + len(written)
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
    ) -> tuple[Callable[[], None], Callable[[], None], Tensor]:
        """Draft and verify as two calls, and where the second leaves its tokens, how many drafts it accepted, and
        whether logits were numbers."""
        session, target = self.session, self.session.target
        policy, taps = session.policy, () if drafter is None else session.taps
        # Keys behind the last are hidden, but memory that was never written may hold what is no number.
        session.cache.blank()
        if drafter is not None:
            session.drafts.blank()
        ids = torch.zeros(count + 1, dtype=torch.long, device=target.device)
        said = torch.zeros(count + 3, dtype=torch.long, device=target.device)

        def draft() -> None:
            ids[:1].copy_(self.anchor)
            if drafter is not None:
                ids[1:].copy_(drafter.propose_fixed(session.drafts, self.start, self.anchor, count, policy, keys))

        def verify() -> None:
            where = FixedRows(session.cache, self.start, count + 1, keys, target.rotary)
            logits, features, _ = target.run(ids[None], where, taps)
            values, choice = logits[0].max(-1)
            accepted = (choice[:-1] == ids[1:]).long().cumprod(0).sum(0, keepdim=True)
            if drafter is not None:
                drafter.observe_fixed(session.drafts, self.start, ids, features, keys)
            said.copy_(torch.cat((choice, accepted, values.isfinite().all()[None].long())))
            self.start.add_(accepted + 1)
            self.anchor.copy_(choice.index_select(0, accepted))

        if self.pool is None:
            return draft, verify, said
        return self._record(draft, start, anchor), self._record(verify, start, anchor), said

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


class Stopwatch:
    """Seconds of the first part of a round: by the device's own clock where it runs behind the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times = [self._now()]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        self.times.append(self._now())

    def seconds(self) -> float:
        """To be asked once the device has done both parts."""
        first, second = self.times
        return second - first if self.device.type != "cuda" else first.elapsed_time(second) / 1e3
