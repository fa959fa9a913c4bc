"""A drafter beside lookup from outside: which of both drafts, what they learn, and that none of it
changes a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpdraft import Lookup, Mixed, Sampling, Session
from sharpdraft.decode.batch import Batch
from sharpdraft.decode.graphs import StaticRounds
from sharpdraft.decode.replay import replay
from sharpdraft.decode.session import Arm
from sharpdraft.drafters import mixed
from sharpdraft.drafters.base import Draft, likeliest
from sharpdraft.drafters.mixed import Estimates
from sharpdraft.model.placement import Ragged
from support.drafters import Oracle, append
from support.families import drafter_of
from support.sessions import AR, LOW, check_caches, settings_of, use
from support.tiny import PROMPT, Tiny, continuation

FAMILIES = ["dflash", "eagle3", "pard"]


class Noting(Oracle):
    """Knows the text, and notes how many requests it drafted for at once."""

    def __init__(self, text: Sequence[int], wrong: Sequence[int] = ()) -> None:
        super().__init__(text, wrong)
        self.passes: list[int] = []

    def propose(self, at: Any, caches: Any, *rest: Any) -> list[Draft]:
        self.passes.append(len(caches))
        return super().propose(at, caches, *rest)


def ask(
    drafter: Mixed, caches: list[Any], anchors: list[int], count: int = 7, pick: Any = likeliest
) -> list[list[int]]:
    own, picks = [settings_of()] * len(caches), [pick] * len(caches)
    found = drafter.propose(Ragged(), caches, torch.tensor(anchors), count, own, picks)
    return [each.tokens.tolist() for each in found]


def taken(drafter: Mixed, text: Sequence[int]) -> Any:
    cache = drafter.new_cache(200)
    append(drafter, cache, text, [torch.zeros(1, len(text), 1)])
    return cache


def test_passes_are_for_those_that_need_them(llama: Tiny) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 4
    own = Noting(text)
    drafter = Mixed(own, llama.target)
    new, seen = taken(drafter, text[:5]), taken(drafter, text[:22])
    first = ask(drafter, [new, seen, new, seen], [text[5], text[22], text[5], text[22]])
    assert first == [text[6:11], text[23:30], text[6:11], text[23:30]]
    assert own.passes == [2], "a pass for the two that are new"
    assert ask(drafter, [seen], [text[22]]) == [text[23:30]] and own.passes == [2]
    assert ask(drafter, [seen], [text[22]], 3) == [text[23:26]]


@pytest.mark.parametrize("pick", [likeliest, lambda *both: likeliest(*both)])
def test_what_gets_less_accepted_is_left(
    llama: Tiny, pick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a passage that comes again and again something else follows each time, which the
    drafter knows and the text does not; its passes take as long as the target's."""
    ticks = iter(range(1_000))
    monkeypatch.setattr(mixed.time, "perf_counter", lambda: next(ticks))
    own = Noting([])
    drafter = Mixed(own, llama.target)
    cache = drafter.new_cache(1_000)

    def read(tokens: list[int]) -> None:
        own.text = [*own.text[: cache.length], *tokens, *([0] * 20)]
        append(drafter, cache, tokens, [torch.zeros(1, len(tokens), 1)])

    looked_up = []
    for number in range(40):
        passage, rest = [1, 2, 3, 4, 5, 6], [10 + number % 3, 7, 8, 9, 20 + number]
        read(passage[:5])
        own.text = [*own.text[: cache.length], 6, *rest]
        before = len(own.passes)
        ask(drafter, [cache], [6], pick=pick)
        looked_up.append(len(own.passes) == before)
        if looked_up[-1]:
            read([6])
            read(rest)
        else:
            read([6, *rest])
    assert any(looked_up[:10]) and sum(looked_up[-15:]) <= 1


def test_estimates_follow_what_is_accepted_and_try_again() -> None:
    known, bucket, cost = Estimates(), 3, 0.1
    assert known.looks_up(bucket, cost)
    for _ in range(40):
        known.learn(True, bucket, 0)
    assert not known.looks_up(bucket, cost) and known.looks_up(bucket + 1, cost)
    known = Estimates()

    def share(looked_up: int, drafted: int) -> float:
        """How often lookup is chosen in the end, when so many are accepted."""
        chosen = []
        for _ in range(600):
            chosen.append(known.looks_up(bucket, cost))
            known.learn(chosen[-1], bucket, looked_up if chosen[-1] else drafted)
        return sum(chosen[-100:]) / 100

    # Where both are about as good, the other is tried now and then; so it is found out.
    assert 0.9 < share(3, 3) < 1
    assert share(3, 6) < 0.1
    assert share(7, 6) > 0.9
    assert share(7, 1) == 1
    # What a drafter's passes cost counts too.
    known = Estimates()
    for _ in range(40):
        known.learn(True, bucket, 3)
        known.learn(False, bucket, 4)
    assert [known.looks_up(bucket, each) for each in (0.0, 0.1, 0.5)] == [False, False, True]


def test_only_what_was_proposed_there_is_learned_from(llama: Tiny) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 4
    drafter = Mixed(Noting(text), llama.target)
    cache = taken(drafter, text[:22])

    def tried() -> int:
        return sum(map(sum, cache.estimates.tried.values()))

    def commit(tokens: list[int]) -> None:
        append(drafter, cache, tokens, [torch.zeros(1, len(tokens), 1)])

    ask(drafter, [cache], [text[22]])
    commit(text[22:26])
    assert tried() == 1
    commit(text[26:28])
    assert tried() == 1, "it was not asked"
    ask(drafter, [cache], [text[28]])
    cache.rewind(20)
    commit(text[19:28])
    assert tried() == 1, "it was rolled back"
    with cache.borrowed(24, 8):
        ask(drafter, [cache], [text[24]])
    commit(text[28:30])
    assert tried() == 1 and cache.length == 30, "it was replayed"
    ask(drafter, [cache], [text[30]], 2)
    commit(text[30:33])
    assert tried() == 1, "it was asked for less than it could have had right"


# In a session


@pytest.mark.parametrize("scale", [None, LOW], ids=["frozen", "scaled"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_text_is_the_targets_own(kind: str, scale: Any, llama: Tiny) -> None:
    """Over turns, arms and rewinding; both are kept fed, whichever drafts."""
    drafter = Mixed(drafter_of(kind, llama), llama.target)
    session = Session(llama.target, drafter, settings_of(scale))
    said: list[int] = []
    for prompt in (llama.text[:PROMPT], [7, 8] * 9, [41, 5]):
        answer = continuation(llama.model, said + prompt, 40)
        for other in (True, False):
            session.rewind(len(said))
            session.use(AR) if other else use(session, scale)
            session.catch_up()
            list(session.generate(prompt, 40))
            assert session.tokens == [*said, *prompt, *answer]
        check_caches(session)
        assert session.drafts.text.length == session.drafts.own.length
        assert (
            session.drafts.text.index.tokens[: session.cache.length].tolist() == session.tokens[:-1]
        )
        said = list(session.tokens)
    tried = session.drafts.estimates.tried
    assert min(sum(tried[source]) for source in (True, False)) > 5, "both must have drafted"


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_drafter_drafts_what_it_drafts_alone(
    kind: str, llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookup writes two rounds of three; the others are those of the drafter alone."""
    turns: list[bool] = []

    def next_one(*_: Any) -> bool:
        turns.append(len(turns) % 3 > 0)
        return turns[-1]

    monkeypatch.setattr(Estimates, "looks_up", next_one)
    own = drafter_of(kind, llama)
    session = Session(llama.target, Mixed(own, llama.target), settings_of(LOW, 4))
    session.prefill(llama.text[:PROMPT])
    compared = 0
    while len(session.tokens) < PROMPT + 150:
        at, before = len(session.tokens), len(turns)
        done = session.round(60)
        if len(turns) > before and turns[-1]:
            continue
        alone = Session(llama.target, own, settings_of(LOW, 4))
        alone.read(llama.text[: at - 1])
        alone.tokens.append(llama.text[at - 1])
        expected = alone.round(60)
        assert (done.tokens, done.drafted) == (expected.tokens, expected.drafted)
        compared += done.accepted > 0
    assert compared > 3 and sum(turns) > 5


def test_batches(llama: Tiny) -> None:
    drafter = Mixed(drafter_of("eagle3", llama), llama.target)
    batch = Batch(llama.target, drafter, settings_of(LOW))
    prompts = [llama.text[:PROMPT], [7, 8] * 6, list(range(20)), [3, 4], [3] * 30]
    requests = [batch.add(prompt, 50) for prompt in prompts]
    options = Sampling(1.1, seed=3), Sampling(1.1, seed=3, drafts="likeliest")
    drawn = [batch.add(prompts[1], 50, sampling=each) for each in options]
    while batch.step():
        pass
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens == continuation(llama.model, prompt, 50)
    for request in drawn:
        session = Session(llama.target, drafter, settings_of(LOW), sampling=request.sampling)
        list(session.generate(prompts[1], 50))
        assert session.tokens[len(prompts[1]) :] == request.tokens


@pytest.mark.parametrize("drafts", ["sampled", "likeliest"])
def test_a_seed_repeats_an_answer_whatever_the_clock_says(
    drafts: Any, llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(1.2, seed=7, drafts=drafts)
    drafter = Mixed(drafter_of("dflash", llama), llama.target)
    session = Session(llama.target, drafter, sampling=sampling)
    answers = set()
    for slow in (1.0, 1e6, 1e-6):
        ticks = iter(range(1_000_000))
        clock = lambda slow=slow, ticks=ticks: next(ticks) ** 2 * slow  # noqa: E731
        monkeypatch.setattr(mixed.time, "perf_counter", clock)
        session.rewind(0)
        list(session.generate([7, 8] * 6, 60))
        answers.add(tuple(session.tokens))
    session.sampling = Sampling()
    session.rewind(0)
    list(session.generate([7, 8] * 6, 60))
    session.sampling = sampling
    session.rewind(0)
    list(session.generate([7, 8] * 6, 60))
    assert answers == {tuple(session.tokens)}


def test_replay_drafts_by_both_and_learns_nothing(llama: Tiny) -> None:
    session = Session(llama.target, Mixed(drafter_of("eagle3", llama), llama.target))
    list(session.generate(llama.text[:PROMPT], 120))
    tried = {source: list(each) for source, each in session.drafts.estimates.tried.items()}
    masses: list[Tensor] = []
    rounds = list(replay(session, PROMPT, lambda layer, mass: masses.append(mass)))
    assert [t for r in rounds for t in r.tokens] == session.tokens[PROMPT + 1 :]
    assert masses and sum(r.asked > 0 for r in rounds) * 5 > len(masses)
    assert session.drafts.estimates.tried == tried
    list(session.generate([9], 20))
    assert session.tokens[-20:] == continuation(llama.model, session.tokens[:-20], 20)


def test_lookup_goes_on_where_the_drafter_has_no_positions_left(llama: Tiny) -> None:
    short = drafter_of("pard", llama)
    short.model.max_positions = 40
    session = Session(llama.target, Mixed(short, llama.target))
    alone = Session(llama.target, Lookup(llama.target))
    for each in (session, alone):
        each.prefill(llama.text[:60])
    for _ in range(20):
        done, expected = session.round(50), alone.round(50)
        assert replace(done, draft_seconds=0, verify_seconds=0) == replace(
            expected, draft_seconds=0, verify_seconds=0
        )


def test_it_is_left_to_the_loop_and_stands_beside_others(llama: Tiny) -> None:
    own = drafter_of("dflash", llama)
    drafters = {"both": Mixed(own, llama.target), "one": own, "lookup": Lookup(llama.target)}
    session = Session(llama.target, drafters)
    session.prefill(llama.text[:40])
    for name in [*drafters, *drafters]:
        session.use(Arm(name, name))
        for _ in range(4):
            session.round(50)
            assert session.tokens == llama.text[: len(session.tokens)]
        assert StaticRounds(session).fits(50) == (name == "one")


def test_each_drafts_as_many_as_alone_unless_it_is_said(llama: Tiny) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 6
    own = Noting(text)
    own.num_drafts, own.max_drafts = 12, 16
    drafter = Mixed(own, llama.target)
    assert (drafter.num_drafts, drafter.max_drafts) == (12, 32)
    new, seen = taken(drafter, text[:5]), taken(drafter, text[:22])
    found = ask(drafter, [new, seen], [text[5], text[22]], 12)
    assert [len(each) for each in found] == [12, 7]
    said = [settings_of(drafts=20)] * 2
    anchors, picks = torch.tensor([text[5], text[22]]), [likeliest] * 2
    drafts = drafter.propose(Ragged(), [new, seen], anchors, 20, said, picks)
    assert [len(each.tokens) for each in drafts] == [16, 20]
