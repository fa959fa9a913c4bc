"""EAGLE-3 and PARD from outside, on one loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpdraft import FixedSlope
from sharpdraft.decode.replay import replay
from sharpdraft.decode.session import Session
from sharpdraft.drafters.eagle3 import Eagle3
from sharpdraft.method.scale import Policy
from sharpdraft.method.settings import DraftSettings, FixedLength, Window
from support.families import HEADS, drafter_of, eagle_config, eagle_tensors, pard_of
from support.sessions import AR, settings_of, use
from support.tiny import PROMPT, Tiny

LOW = FixedSlope(9, slope=0.7, top_k=4, max_scale=8.0)


@pytest.mark.parametrize("kind", ["dflash", "dflash, window", "eagle3", "eagle3, variant", "pard"])
@pytest.mark.parametrize(
    "settings",
    [
        DraftSettings(view=Window(12)),
        DraftSettings(view=Window(12, 4)),
        DraftSettings(LOW, Window(20, 2), FixedLength(3)),
    ],
    ids=lambda settings: settings.text(),
)
def test_views_change_drafts_and_never_the_text(
    llama: Tiny, kind: str, settings: DraftSettings
) -> None:
    rounds = []
    for own in (settings, DraftSettings(length=settings.length)):
        session = Session(llama.target, drafter_of(kind, llama), own)
        live = list(session.generate(llama.text[:PROMPT], 120))
        assert session.tokens == llama.text[: PROMPT + 120]
        rounds.append([(r.context, r.drafted, r.accepted) for r in live[1:]])
        again = [(r.context, r.drafted, r.accepted) for r in replay(session, PROMPT)]
        assert again == rounds[-1]
    assert rounds[0] != rounds[1], "the view must change drafts for this to say anything"


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "pard"])
def test_mass_is_of_what_a_view_leaves_visible(llama: Tiny, kind: str) -> None:
    """Of 32 visible Keys the top 32 are all there is; of more they are not."""
    for view, whole in ((Window(20, 4), True), (Window(40, 4), False)):
        session = Session(llama.target, drafter_of(kind, llama), DraftSettings(view=view))
        list(session.generate(llama.text[:PROMPT], 120))
        found = torch.tensor([])

        def probe(layer: int, mass: Tensor) -> None:
            nonlocal found
            found = torch.cat((found, mass.flatten()))

        list(replay(session, PROMPT + 60, probe))
        assert bool((found > 1 - 1e-5).all()) == whole and bool((found <= 1 + 1e-5).all())


@pytest.fixture(params=["eagle3", "pard"])
def family(request: pytest.FixtureRequest, llama: Tiny) -> Callable[[], Any]:
    if request.param == "pard":
        return lambda: pard_of(llama)[0]
    config = eagle_config(fc_norm=True, norm_output=True)
    return lambda: Eagle3(config, eagle_tensors(config, llama.target), llama.target)


@pytest.mark.parametrize("policy", [None, LOW], ids=["frozen", "scaled"])
def test_output_is_the_targets_whatever_is_drafted(
    llama: Tiny, family: Callable[[], Any], policy: Policy | None
) -> None:
    session = Session(llama.target, family(), settings_of(policy, 4))
    rounds = list(session.generate(llama.text[:PROMPT], 120))
    assert session.tokens == llama.text[: PROMPT + 120]
    accepted = [r.accepted for r in rounds[1:]]
    assert max(accepted) > 0, "a drafter that is never right shows nothing"
    # Turns, arms and a rewind on one cache write what a fresh session writes, with the same rounds.
    session.rewind(PROMPT + 30)
    session.use(AR)
    list(session.generate([llama.text[PROMPT + 30]], 5))
    use(session, policy, 4)
    session.rewind(PROMPT + 20)
    again = list(session.generate(llama.text[PROMPT + 20 : PROMPT + 40], 60))
    fresh = Session(llama.target, family(), settings_of(policy, 4))
    expected = list(fresh.generate(llama.text[: PROMPT + 40], 60))
    assert [(r.tokens, r.accepted) for r in again] == [(r.tokens, r.accepted) for r in expected]


def test_another_text_on_a_used_cache(llama: Tiny, family: Callable[[], Any]) -> None:
    session, fresh = (Session(llama.target, family(), settings_of(drafts=4)) for _ in range(2))
    list(session.generate(llama.text[:PROMPT], 60))
    session.rewind(0)
    other = llama.text[PROMPT : 2 * PROMPT + 9][::-1]
    again, expected = (list(s.generate(other, 60)) for s in (session, fresh))
    assert [(r.tokens, r.accepted) for r in again] == [(r.tokens, r.accepted) for r in expected]


def test_replay_is_what_a_live_run_does(llama: Tiny, family: Callable[[], Any]) -> None:
    """Of other policies too, and it leaves the caches as they were."""
    live: dict[str, list[tuple[int, int]]] = {}
    for name, policy in (("frozen", None), ("low", LOW)):
        session = Session(llama.target, family(), settings_of(policy, 3))
        rounds = list(session.generate(llama.text[:PROMPT], 100))[1:]
        live[name] = [(r.context, r.accepted) for r in rounds]
    masses: list[Tensor] = []
    reader = Session(llama.target, family(), settings_of(drafts=3))
    reader.read(llama.text[: PROMPT + 100])
    reader.tokens = llama.text[: PROMPT + 100]
    for _ in range(2):
        for name, policy in (("frozen", None), ("low", LOW)):
            use(reader, policy, 3)
            found = replay(reader, PROMPT, lambda layer, mass: masses.append(mass))
            assert [(r.context, r.accepted) for r in found] == live[name]
    assert live["low"] != live["frozen"]
    assert all(
        mass.shape[0] == HEADS and bool(((mass > 0) & (mass <= 1.0001)).all()) for mass in masses
    )
