"""Replay: the rounds of a live run without the target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from sharpdraft.decode.replay import replay
from sharpdraft.decode.rounds import Round
from sharpdraft.decode.session import Session
from sharpdraft.method.policies import FixedSlope
from support.drafters import make_drafter
from support.sessions import ARMS, set_arm, settings_of, use
from support.tiny import PROMPT, Tiny, continuation

LOW = FixedSlope(33)  # Scales from 34 Keys on, as far as the tiny targets' contexts go.


def figures(rounds: Iterable[Round]) -> list[tuple[Any, ...]]:
    return [(r.tokens, r.context, r.drafted, r.accepted) for r in rounds]


@pytest.mark.parametrize("arm", ["frozen", "sharpdraft", "fixed"])
def test_replay_is_the_live_run_without_the_target(tiny: Tiny, arm: str) -> None:
    session = Session(tiny.target, make_drafter(tiny.target))
    set_arm(session, arm)
    live = figures(list(session.generate(tiny.text[:PROMPT], 100))[1:])
    keys, values, length = (
        session.drafts.keys.clone(),
        session.drafts.values.clone(),
        session.drafts.length,
    )
    calls: list[int] = []
    assert figures(replay(session, PROMPT, lambda layer, mass: calls.append(layer))) == live
    assert calls == [0, 1] * sum(r[2] > 0 for r in live)
    assert session.drafts.length == length
    # Every bit up to the end of the text is as it was; what lies beyond is nobody's.
    assert torch.equal(session.drafts.keys[..., :length, :], keys[..., :length, :])
    assert torch.equal(session.drafts.values[..., :length, :], values[..., :length, :])


def test_replay_on_a_read_text_equals_live_rounds(tiny: Tiny) -> None:
    """As the bench uses it: AR's text, read in one piece, under policies other than the one that
    wrote it."""
    count = 90
    drafter = make_drafter(tiny.target)
    reader = Session(tiny.target, drafter)
    reader.read(tiny.text[: PROMPT + count])
    reader.cache.length = reader.drafts.length = len(reader.tokens) - 1
    seen = []
    for arm in ("frozen", "sharpdraft", "fixed"):
        live = Session(tiny.target, drafter)
        set_arm(live, arm)
        rounds = figures(list(live.generate(tiny.text[:PROMPT], count))[1:])
        use(reader, ARMS[arm][1])
        assert figures(replay(reader, PROMPT)) == rounds
        seen.append([r[3] for r in rounds])
    assert seen[0] != seen[1] and seen[0] != seen[2], (
        "the policies must differ for this to say anything"
    )


def test_replay_left_early_restores_the_cache(llama: Tiny) -> None:
    session = Session(llama.target, make_drafter(llama.target))
    list(session.generate(llama.text[:PROMPT], 60))
    keys, length = session.drafts.keys.clone(), session.drafts.length
    use(session, LOW)
    for start in (PROMPT, PROMPT + 30, len(session.tokens) - 3):
        rounds = replay(session, start)
        next(rounds)
        rounds.close()
        assert session.drafts.length == length
        assert torch.equal(session.drafts.keys[..., :length, :], keys[..., :length, :])
    list(session.generate([9], 20))
    before = [*llama.text[: PROMPT + 60], 9]
    assert session.tokens == before + continuation(llama.model, before, 20)


def test_replay_after_a_stop(llama: Tiny) -> None:
    """Where a stop token ended the text, the live round may have drafted beyond it: all rounds
    before agree."""
    stop = llama.text[PROMPT + 90]
    session = Session(llama.target, make_drafter(llama.target), settings_of(LOW))
    live = figures(list(session.generate(llama.text[:PROMPT], 150, (stop,)))[1:])
    assert session.finish == "stop"
    again = figures(replay(session, PROMPT))
    assert again[: len(live) - 1] == live[:-1]
    assert [t for r in again for t in r[0]] == [t for r in live for t in r[0]]
