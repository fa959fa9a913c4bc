"""A draft LM with fewer positions than its target: behind the last of them the target goes on
alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sharpdraft import FixedSlope
from sharpdraft.decode.batch import Batch
from sharpdraft.decode.replay import replay
from sharpdraft.decode.rounds import Round
from sharpdraft.decode.sampling import Sampling
from sharpdraft.decode.session import Session
from sharpdraft.drafters.pard import Pard
from sharpdraft.method.scale import Scale
from sharpdraft.method.settings import DraftSettings, Window
from sharpdraft.model.causal_lm import CausalLM
from support.families import make_pard
from support.sessions import AR, settings_of, use
from support.tiny import POSITIONS, PROMPT, VOCAB, Tiny

OWN, DRAFTED = 64, 4
STEEP = FixedSlope(9, slope=0.7, top_k=4, max_scale=8.0)


def short(tiny: Tiny, positions: int = OWN) -> Pard:
    model = make_pard(positions=positions)
    model.lm_head.weight.data.copy_(tiny.model.lm_head.weight)
    return Pard(CausalLM.of(model), VOCAB - 1, tiny.target)


def check_rounds(rounds: Sequence[Round]) -> None:
    """They draft while there is room for all of it, and nothing where there is none."""
    for done in rounds[:-1]:
        if done.context + DRAFTED < OWN:
            assert done.drafted == DRAFTED
        if done.context >= OWN:
            assert (done.drafted, done.accepted, len(done.tokens)) == (0, 0, 1)
    assert any(done.drafted for done in rounds) and not rounds[-1].drafted


@pytest.mark.parametrize(
    "settings",
    [
        settings_of(drafts=DRAFTED),
        settings_of(STEEP, DRAFTED),
        settings_of(None, DRAFTED, Window(20)),
    ],
    ids=["frozen", "scaled", "window"],
)
def test_the_target_goes_on_alone(llama: Tiny, settings: DraftSettings) -> None:
    session = Session(llama.target, short(llama), settings)
    rounds = list(session.generate(llama.text[:PROMPT], 150))
    assert session.tokens == llama.text[: PROMPT + 150]
    check_rounds(rounds[1:])
    known = [(r.context, r.drafted, r.accepted) for r in rounds[1:]]
    assert known == [(r.context, r.drafted, r.accepted) for r in replay(session, PROMPT)]
    # Back within its positions it drafts as before.
    session.rewind(PROMPT + 10)
    again = list(session.generate(llama.text[PROMPT + 10 : PROMPT + 12], 100))
    assert session.tokens == llama.text[: PROMPT + 112]
    check_rounds(again[1:])


@pytest.mark.parametrize("scale", [None, STEEP], ids=["frozen", "scaled"])
def test_a_prompt_beyond_them(llama: Tiny, scale: Scale | None) -> None:
    session = Session(llama.target, short(llama), settings_of(scale, DRAFTED))
    rounds = list(session.generate(llama.text[:90], 60))
    assert session.tokens == llama.text[:150]
    assert not any(r.drafted for r in rounds)
    # Arms that change there: with nothing drafted, and with other settings.
    session.use(AR)
    list(session.generate(llama.text[150:151], 9))
    use(session, STEEP, DRAFTED)
    list(session.generate(llama.text[160:161], 9))
    assert session.tokens == llama.text[:170]


@pytest.mark.parametrize("positions", [1, 2, 5, PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 5])
def test_hardly_any_positions(llama: Tiny, positions: int) -> None:
    session = Session(llama.target, short(llama, positions), settings_of(drafts=DRAFTED))
    list(session.generate(llama.text[:PROMPT], 50))
    assert session.tokens == llama.text[: PROMPT + 50]


def test_requests_that_pass_them_at_different_times(llama: Tiny) -> None:
    batch = Batch(llama.target, short(llama), settings_of(drafts=DRAFTED))
    ends = [(PROMPT, 100), (PROMPT + 60, 60), (PROMPT + 5, 20), (PROMPT + 40, 90)]
    requests = [batch.add(llama.text[:start], count) for start, count in ends]
    drafted: dict[int, list[int]] = {number: [] for number in range(len(ends))}
    while written := batch.step():
        for request, done in written:
            drafted[requests.index(request)].append(done.drafted)
    for request, (start, count) in zip(requests, ends, strict=True):
        assert request.tokens == llama.text[start : start + count]
    assert [max(found) for found in drafted.values()] == [DRAFTED, 0, DRAFTED, DRAFTED]
    assert [drafted[number][-2] for number in (0, 1, 3)] == [0, 0, 0]


def test_sampled_texts_go_on_too(llama: Tiny) -> None:
    session = Session(
        llama.target, short(llama), settings_of(drafts=DRAFTED), sampling=Sampling(1.0, seed=4)
    )
    rounds = list(session.generate(llama.text[:PROMPT], POSITIONS - PROMPT - 10))
    assert len(session.tokens) == POSITIONS - 10
    check_rounds(rounds[1:])


def test_it_does_not_shorten_the_targets_own(llama: Tiny) -> None:
    """The very end of what the target has is written, and no draft is made there."""
    session = Session(llama.target, short(llama), settings_of(drafts=DRAFTED))
    list(session.generate(llama.text[:PROMPT], POSITIONS))
    assert session.finish == "context" and len(session.tokens) == POSITIONS
