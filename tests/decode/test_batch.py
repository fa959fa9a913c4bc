"""Batches from outside: a request writes in any company what it writes alone, and memory stays
bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sharpdraft import FixedSlope
from sharpdraft.decode.batch import Batch, Request
from sharpdraft.decode.sampling import GREEDY, Sampling
from sharpdraft.decode.session import Session
from sharpdraft.decode.step import step
from sharpdraft.drafters.eagle3 import Eagle3
from sharpdraft.drafters.pard import Pard
from sharpdraft.errors import SharpDraftError
from sharpdraft.method.settings import DraftSettings, Window
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.stack import Stack
from support.drafters import make_drafter
from support.families import eagle_config, eagle_tensors, make_pard
from support.sessions import settings_of
from support.tiny import PROMPT, VOCAB, Tiny

STEEP = FixedSlope(9, slope=0.7, top_k=4, max_scale=8.0)
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda target: None,
    "dflash": make_drafter,
    "eagle3": lambda target: Eagle3(eagle_config(), eagle_tensors(eagle_config(), target), target),
    "pard": lambda target: Pard(CausalLM.of(make_pard()), VOCAB - 1, target),
}


def alone(
    request: Request, target: CausalLM, drafter: Any, settings: Any
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Tokens and rounds of a request that has the engine to itself."""
    session = Session(target, drafter, settings, capacity=request.size, sampling=request.sampling)
    rounds = list(session.generate(request.prompt, request.max_new_tokens, request.stop))
    return session.tokens[len(request.prompt) :], [
        (r.context, r.drafted, r.accepted) for r in rounds
    ]


def finished(batch: Batch) -> dict[Request, list[tuple[int, int, int]]]:
    found: dict[Request, list[tuple[int, int, int]]] = {}
    while written := batch.step():
        for request, done in written:
            found.setdefault(request, []).append((done.context, done.drafted, done.accepted))
    return found


@pytest.mark.parametrize(
    "settings",
    [settings_of(), settings_of(STEEP), settings_of(STEEP, view=Window(12, 3))],
    ids=["frozen", "steep", "steep, window and sinks"],
)
@pytest.mark.parametrize("family", DRAFTERS)
def test_a_request_writes_in_company_what_it_writes_alone(
    family: str, settings: DraftSettings, llama: Tiny
) -> None:
    drafter = DRAFTERS[family](llama.target)
    batch = Batch(llama.target, drafter, settings)
    plans = [
        (0, PROMPT, 40, ()),
        (3, 2, 25, ()),
        (9, 90, 1, ()),
        (1, 60, 33, (13,)),
        (30, 1, 50, ()),
        (0, PROMPT, 7, ()),
    ]
    requests = [
        batch.add(llama.text[at : at + length], new, stop=stop) for at, length, new, stop in plans
    ]
    sampled = [
        batch.add(llama.text[:PROMPT], 30, sampling=Sampling(1.2, seed=seed)) for seed in (3, 4)
    ]
    rounds = finished(batch)
    for request in [*requests, *sampled]:
        tokens, own = alone(request, llama.target, drafter, settings)
        assert request.tokens == tokens and rounds[request] == own
        assert request.finish == ("stop" if tokens[-1] in request.stop else "length")
    assert sampled[0].tokens != sampled[1].tokens
    assert not batch.running and not batch.waiting


def test_every_row_is_counted_by_its_own_request(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gain that is the count itself: a causal drafter's rows of a request at p see p + 1, p + 2,
    ... Keys."""
    seen: list[list[float]] = []
    right = Stack.run

    def noting(self: Stack, hidden: Any, rows: Any, views: Any, gains: Any, **rest: Any) -> Any:
        seen.extend(gain.tolist() for gain in gains if gain is not None)
        return right(self, hidden, rows, views, [None] * len(gains), **rest)

    class Count:
        def gain(self, keys: torch.Tensor) -> torch.Tensor:
            return keys.float()

    monkeypatch.setattr(Stack, "run", noting)
    drafter = DRAFTERS["eagle3"](llama.target)
    sessions = [Session(llama.target, drafter, settings_of(Count(), 3)) for _ in range(3)]
    for session, length in zip(sessions, (5, 40, 17), strict=True):
        session.prefill(llama.text[:length])
    seen.clear()
    step(sessions, [4, 4, 4], [()] * 3)
    assert seen == [[length + step for length in (5, 40, 17)] for step in range(3)]


def test_memory_is_bounded_and_order_kept(llama: Tiny) -> None:
    batch = Batch(llama.target, None, max_requests=3, max_tokens=60)
    requests = [
        batch.add(llama.text[:length], new)
        for length, new in ((10, 5), (20, 30), (8, 2), (4, 4), (40, 20))
    ]
    ended: list[Request] = []
    while batch.step():
        assert sum(request.size for request in batch.running) <= 60 and len(batch.running) <= 3
        ended += [request for request in requests if request.finish and request not in ended]
    assert ended[-1] is requests[4], (
        "the last and largest waits until it fits, and is not passed over for ever"
    )
    assert all(request.finish == "length" for request in requests)


def test_what_can_never_run_is_refused(llama: Tiny) -> None:
    batch = Batch(llama.target, None, max_tokens=50)
    for prompt, new, said in (
        ([], 5, "prompt is empty"),
        ([VOCAB], 5, "outside the vocabulary"),
        ([1], 0, "at least 1"),
        ([1] * 40, 20, "at most 50 fit"),
    ):
        with pytest.raises(SharpDraftError, match=said):
            batch.add(prompt, new)
    assert batch.step() == []


def test_a_cancelled_request_leaves_and_others_go_on(llama: Tiny) -> None:
    batch = Batch(llama.target, make_drafter(llama.target), settings_of(STEEP), max_requests=2)
    one, two, three = (batch.add(llama.text[: PROMPT + i], 40) for i in range(3))
    batch.step()
    batch.cancel(one)
    written = list(one.tokens)
    batch.cancel(three)
    assert [r for r, _ in batch.step()] == [two]
    finished(batch)
    assert (one.finish, three.finish, three.tokens) == ("cancelled", "cancelled", [])
    assert one.tokens == written and written
    assert two.tokens == alone(two, llama.target, make_drafter(llama.target), STEEP)[0]
    batch.cancel(two)
    assert two.finish == "length"


class Company(RuleBasedStateMachine):
    """Requests of all lengths come, go on and are cancelled in any order; each is compared with
    itself alone."""

    def __init__(self, target: CausalLM, drafters: dict[str, Any]) -> None:
        super().__init__()
        self.target, self.drafters = target, drafters

    @initialize(
        family=st.sampled_from(sorted(DRAFTERS)),
        policy=st.sampled_from([None, STEEP]),
        most=st.integers(1, 4),
    )
    def start(self, family: str, policy: Any, most: int) -> None:
        self.drafter, self.policy = self.drafters[family], policy
        self.batch = Batch(
            self.target, self.drafter, settings_of(policy), max_requests=most, max_tokens=160
        )
        self.requests: list[Request] = []

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60),
        new=st.integers(1, 30),
        sampling=st.sampled_from([GREEDY, Sampling(1.0, seed=1), Sampling(repetition_penalty=1.3)]),
        stop=st.sampled_from([(), (5, 9, 13)]),
    )
    def add(self, prompt: list[int], new: int, sampling: Sampling, stop: tuple[int, ...]) -> None:
        self.requests.append(self.batch.add(prompt, new, sampling=sampling, stop=stop))

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.batch.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.batch.cancel(data.draw(st.sampled_from(self.requests)))

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "batch"):
            assert sum(request.size for request in self.batch.running) <= 160

    def teardown(self) -> None:
        if not hasattr(self, "batch"):
            return
        finished(self.batch)
        for request in self.requests:
            tokens, _ = alone(request, self.target, self.drafter, self.policy)
            if request.finish == "cancelled":
                assert request.tokens == tokens[: len(request.tokens)]
            else:
                assert request.tokens == tokens


def test_company(llama: Tiny) -> None:
    drafters = {name: make(llama.target) for name, make in DRAFTERS.items()}
    run_state_machine_as_test(
        lambda: Company(llama.target, drafters),
        settings=settings(
            max_examples=25,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
