"""Expected rounds on sampled texts, against the rounds that live runs had on their way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpdraft.decode import expected as module
from sharpdraft.decode.expected import expected
from sharpdraft.decode.replay import replay
from sharpdraft.decode.sampling import Sampling
from sharpdraft.decode.session import Session
from sharpdraft.drafters.lookup import Lookup
from support.drafters import make_drafter
from support.families import drafter_of
from support.sessions import settings_of
from support.tiny import PROMPT, Tiny

FAMILIES = ("dflash", "eagle3", "pard")
TOKENS = 40
DRAFTS = 3

SAMPLINGS: dict[str, Callable[[int], Sampling]] = {
    "warm": lambda seed: Sampling(0.7, seed=seed),
    "filtered": lambda seed: Sampling(1.0, top_p=0.8, repetition_penalty=1.2, seed=seed),
    "likeliest drafts": lambda seed: Sampling(0.7, seed=seed, drafts="likeliest"),
}


def drafter(family: str, tiny: Tiny) -> Any:
    if family == "lookup":
        return Lookup(tiny.target)
    return make_drafter(tiny.target) if family == "dflash" else drafter_of(family, tiny)


def surprise(tiny: Tiny, family: str, sampling: Callable[[int], Sampling], texts: int) -> float:
    """How many standard deviations the rounds of live runs lie from what is expected of their
    texts, and so their accepted drafts."""
    session = Session(tiny.target, drafter(family, tiny), settings_of(drafts=DRAFTS))
    off = []
    for seed in range(texts):
        session.rewind(0)
        session.sampling = sampling(seed)
        rounds = list(session.generate(tiny.text[:PROMPT], TOKENS))[1:]
        session.catch_up()
        found = list(expected(session, PROMPT))
        assert sum(each.weight * (each.accepted + 1) for each in found) == pytest.approx(TOKENS - 1)
        assert all(0 <= each.accepted <= each.drafted <= DRAFTS for each in found)
        off.append(len(rounds) - sum(each.weight for each in found))
    values = torch.tensor(off, dtype=torch.double)
    return float(values.sum().abs() / (values.std() * math.sqrt(texts)).clamp(min=1e-9))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", [*FAMILIES, "lookup"])
def test_expected_rounds_are_those_of_live_runs(llama: Tiny, family: str, sampling: str) -> None:
    assert surprise(llama, family, SAMPLINGS[sampling], 24) < 4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_thousand_rounds(llama: Tiny, family: str) -> None:
    assert surprise(llama, family, SAMPLINGS["warm"], 10_000 // 25) < 4


def test_a_wrong_q_is_noticed(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._Along.__call__

    def flattened(self: Any, logits: Tensor, token_of: Tensor | None) -> Any:
        return right(self, logits / 2, token_of)

    monkeypatch.setattr(module._Along, "__call__", flattened)
    assert surprise(llama, "eagle3", SAMPLINGS["warm"], 48) > 5


@pytest.mark.parametrize("family", [*FAMILIES, "lookup"])
def test_of_a_likeliest_text_nothing_is_left_to_chance(llama: Tiny, family: str) -> None:
    """Greedily, rounds are expected to be what a replay says they are."""
    session = Session(llama.target, drafter(family, llama), settings_of(drafts=DRAFTS))
    list(session.generate(llama.text[:PROMPT], TOKENS))
    session.catch_up()
    session.sampling = Sampling(1e-4, seed=0, drafts="likeliest")
    found = {each.context: each for each in expected(session, PROMPT) if each.weight > 0.5}
    rounds = list(replay(session, PROMPT))
    assert [each.context for each in rounds] == list(found)
    for each in rounds:
        assert found[each.context].accepted == pytest.approx(each.accepted, abs=1e-3)


def test_the_session_is_as_before(llama: Tiny) -> None:
    session = Session(llama.target, drafter("eagle3", llama), settings_of(drafts=DRAFTS))
    session.sampling = Sampling(0.7, seed=1)
    list(session.generate(llama.text[:PROMPT], TOKENS))
    session.catch_up()
    tokens, length, drafts = list(session.tokens), session.cache.length, session.drafts.length
    first = list(expected(session, PROMPT))
    assert (session.tokens, session.cache.length, session.drafts.length) == (tokens, length, drafts)
    assert list(expected(session, PROMPT)) == first
