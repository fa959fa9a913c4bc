"""Rounds of fixed shape against the ordinary loop: the same rounds, and no question to the device
within one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sharpdraft import FixedSlope, Sampling, Session, SharpDraftError
from sharpdraft.decode import graphs as fixed
from sharpdraft.decode.graphs import StaticRounds
from sharpdraft.decode.replay import replay
from sharpdraft.decode.rounds import Round
from sharpdraft.decode.session import Arm
from sharpdraft.decode.step import step
from sharpdraft.method.policies import Constant
from sharpdraft.method.scale import Policy
from sharpdraft.method.settings import Window
from sharpdraft.model.causal_lm import CausalLM
from support.drafters import make_drafter
from support.families import drafter_of
from support.sessions import AR, settings_of, use
from support.tiny import BLOCK, POSITIONS, Tiny, make_model

STEEP = FixedSlope(33, slope=0.2, max_scale=5.0)
DRAFTERS = [
    "none",
    "dflash",
    "dflash, causal",
    "dflash, window",
    "eagle3",
    "eagle3, variant",
    "pard",
]


@pytest.fixture(params=DRAFTERS)
def pair(
    request: pytest.FixtureRequest, llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> tuple[Session, Session]:
    """Two sessions of one drafter; lengths of the text pass several numbers of Keys."""
    monkeypatch.setattr(fixed, "_FEWEST_KEYS", 32)
    drafter = drafter_of(request.param, llama)
    own = settings_of(drafts=4)
    return tuple(Session(llama.target, drafter, own) for _ in range(2))  # type: ignore[return-value]


def shown(done: Round) -> tuple[Any, ...]:
    return done.tokens, done.context, done.drafted, done.accepted


@pytest.mark.parametrize(
    ("policy", "view"),
    [(None, None), (FixedSlope(33), None), (STEEP, None), (STEEP, Window(40, 3))],
    ids=["frozen", "sharpdraft", "steep", "steep, window and sinks"],
)
def test_rounds_are_those_of_the_loop(
    pair: tuple[Session, Session], llama: Tiny, policy: Policy | None, view: Window | None
) -> None:
    ours, loop = pair
    rounds = StaticRounds(ours)
    for session in pair:
        use(session, policy, 4, view)
        session.prefill(llama.text[:30])
    accepted = 0
    while rounds.fits(left := 180 - len(ours.tokens)):
        done, expected = rounds.round(()), step([loop], [left], [()])[0]
        assert shown(done) == shown(expected)
        accepted += done.accepted
        assert ours.tokens == loop.tokens == llama.text[: len(ours.tokens)]
    assert len(ours.tokens) > 170 and len({kind[1] for kind in rounds.passes}) > 2
    assert accepted > 10 or ours.drafter is None


def test_they_alternate_with_all_else(pair: tuple[Session, Session], llama: Tiny) -> None:
    """Ordinary rounds, rewinding, other policies, target-only decoding and stop tokens in
    between."""
    ours, loop = pair
    rounds = StaticRounds(ours)
    for session in pair:
        session.prefill(llama.text[:40])
    script: list[Callable[[Session], Any]] = [
        lambda s: None,
        lambda s: step([s], [9], [()]),
        lambda s: use(s, STEEP, 4),
        lambda s: s.rewind(35),
        lambda s: s.use(AR),
        lambda s: None,
        lambda s: use(s, STEEP, 4),
        lambda s: use(s, Constant(1.7), 4),
        lambda s: (s.read(llama.text[len(s.tokens) : len(s.tokens) + 7]), s.rewind(len(s.tokens))),
        lambda s: use(s, Constant(1.7), 2),
        lambda s: use(s, STEEP, 4, Window(24)),
        lambda s: use(s, STEEP, 4, Window(9, 5)),
    ]
    for change in script * 2:
        for session in pair:
            change(session)
        for _ in range(3):
            assert rounds.fits(50)
            stop = {llama.text[len(ours.tokens) + 1]}
            done, expected = rounds.round(stop), step([loop], [50], [stop])[0]
            assert shown(done) == shown(expected)
            assert ours.tokens == llama.text[: len(ours.tokens)]


def test_nothing_within_a_round_asks_the_device(pair: tuple[Session, Session], llama: Tiny) -> None:
    """Tensors without values answer no question: an operation that needs one fails."""
    session, _ = pair
    use(session, STEEP)
    session.prefill(llama.text[:40])
    rounds = StaticRounds(session)
    rounds.round(())
    (passes,) = rounds.passes.values()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        with pytest.raises(DataDependentOutputException):
            int(torch.zeros(1).sum())
        passes.draft()
        passes.verify()


def test_when_a_round_is_left_to_the_loop(llama: Tiny) -> None:
    drafter = make_drafter(llama.target)
    session = Session(llama.target, drafter, capacity=POSITIONS - 100)
    rounds = StaticRounds(session)
    session.prefill(llama.text[:3])
    assert not rounds.fits(50), "a block is longer than the text"
    session.rewind(0)
    session.prefill(llama.text[:100])
    assert rounds.fits(BLOCK) and not rounds.fits(BLOCK - 1), "less is wanted than a block"
    session.tokens += [1] * (session.cache.capacity - BLOCK + 1 - len(session.tokens))
    assert rounds.fits(50), "the block just fits"
    session.tokens.append(1)
    assert not rounds.fits(50), "the context is full"
    session.rewind(100)
    session.sampling = Sampling(temperature=0.5)
    session.prefill(llama.text[100:110])
    assert not rounds.fits(50), "sampling is the host's"


def test_logits_that_are_no_numbers_are_refused_and_nothing_is_lost() -> None:
    model = make_model("llama")
    target = CausalLM.of(model)
    session, loop = (Session(target, make_drafter(target)) for _ in range(2))
    for each in (session, loop):
        each.prefill(list(range(20)))
    rounds, norm = StaticRounds(session), target.stack.norm
    for _ in range(2):
        target.stack.norm = norm * torch.nan
        with pytest.raises(SharpDraftError, match="NaN"):
            rounds.round(())
        with pytest.raises(SharpDraftError, match="NaN"):
            step([loop], [50], [()])
        target.stack.norm = norm
        assert shown(rounds.round(())) == shown(step([loop], [50], [()])[0])
    assert session.tokens == loop.tokens


def test_a_session_goes_when_nobody_holds_it(llama: Tiny) -> None:
    """Its caches may be most of a GPU's memory, which no garbage collector sees."""
    session = Session(llama.target, make_drafter(llama.target))
    session.prefill(llama.text[:40])
    session._static = StaticRounds(session)
    session._static.round(())
    known = weakref.ref(session.cache)
    gc.disable()
    try:
        del session
        assert known() is None
    finally:
        gc.enable()


def test_pairs_that_a_replay_wrote_over_are_made_again(llama: Tiny) -> None:
    session, loop = (
        Session(llama.target, drafter_of("eagle3", llama), settings_of(drafts=4)) for _ in range(2)
    )
    for each in (session, loop):
        each.prefill(llama.text[:60])
        use(each, STEEP, 4)
        list(replay(each, 30))
        use(each, None, 4)
    rounds = StaticRounds(session)
    for _ in range(8):
        assert shown(rounds.round(())) == shown(step([loop], [50], [()])[0])


def test_memory_that_was_never_written_does_no_harm(llama: Tiny) -> None:
    session = Session(llama.target, make_drafter(llama.target))
    for cache in (session.cache, session.drafts):
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    session.prefill(llama.text[:40])
    rounds = StaticRounds(session)
    for _ in range(10):
        rounds.round(())
    assert session.tokens == llama.text[: len(session.tokens)]


def test_several_drafters_take_turns(llama: Tiny) -> None:
    drafters = {kind: drafter_of(kind, llama) for kind in ("dflash", "eagle3", "pard")}
    session = Session(llama.target, drafters)
    rounds = StaticRounds(session)
    session.prefill(llama.text[:40])
    for name in [*drafters, *drafters]:
        session.use(Arm(name, name, settings_of(drafts=4)))
        alone = Session(llama.target, drafters[name], settings_of(drafts=4))
        alone.prefill(session.tokens[:-1])
        for _ in range(4):
            assert shown(rounds.round(())) == shown(step([alone], [50], [()])[0])
