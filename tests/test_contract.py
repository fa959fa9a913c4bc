"""The contract: every kind of policy and every view does in every host what it does by hand.

A kind joins by being registered: it then needs an example in `support.contract`, with its gain
written out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from sharpdraft.adapters.attach import attach
from sharpdraft.adapters.vllm.request import settings_in
from sharpdraft.decode.session import Session
from sharpdraft.errors import SharpDraftError
from sharpdraft.lab.arms import arms_of
from sharpdraft.method import registry
from sharpdraft.method.settings import DraftSettings, Window
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.kernels import build
from support.checkpoints import Checkpoints
from support.command import Run
from support.contract import (
    EXAMPLES,
    PLACES,
    VIEWS,
    Both,
    Case,
    Example,
    Place,
    PlainAttention,
)
from support.drafters import make_drafter
from support.tiny import PROMPT, Tiny
from support.vllm_standin import config

KINDS = ["none", *(kind.name for kind in registry.kinds("scale"))]
Runner = Callable[[Place, Case], list[Both]]


@pytest.fixture(scope="module")
def targets(llama: Tiny) -> dict[bool, CausalLM]:
    """A target by whether it is laid out for kernels."""
    found = {True: CausalLM.of(llama.model)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "library", lambda lanes: None)
        found[False] = CausalLM.of(llama.model)
    return found


@pytest.fixture
def made_in(targets: dict[bool, CausalLM], monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs a case in a host, with kernels or without."""

    def call(place: Place, case: Case) -> list[Both]:
        if place.compiled is False:
            monkeypatch.setattr(build, "library", lambda lanes: None)
        elif place.compiled and build.library(8) is None:
            pytest.skip("no C++ compiler here")
        return place.run(targets[bool(place.compiled)], case)

    return call


def agree(found: list[Both]) -> bool:
    return all(torch.allclose(made, right, rtol=1e-3, atol=2e-3) for made, right in found)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_every_kind_and_view_in_every_host(
    place: str, kind: str, view: str, made_in: Runner
) -> None:
    assert kind in EXAMPLES, f"add an example of {kind} to support/contract.py"
    case, host = Case(EXAMPLES[kind], VIEWS[view]), PLACES[place].host
    window = VIEWS[view]
    if window is not None and window.sinks and "sinks" not in host.provides:
        with pytest.raises(SharpDraftError, match=r"^view \(sinks@.*window@.*sinks"):
            made_in(PLACES[place], case)
        return
    for made, right in made_in(PLACES[place], case):
        torch.testing.assert_close(made, right, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("view", ["all", "window"])
@pytest.mark.parametrize("place", PLACES)
def test_a_key_too_many_in_the_count_is_noticed(place: str, view: str, made_in: Runner) -> None:
    for off in (-1, 1):
        assert not agree(made_in(PLACES[place], Case(EXAMPLES["fixed_slope"], VIEWS[view], off)))


@pytest.mark.parametrize("place", PLACES)
def test_a_key_too_many_in_the_window_is_noticed(place: str, made_in: Runner) -> None:
    right = made_in(PLACES[place], Case(EXAMPLES["constant"], Window(7)))
    for other in (Window(6), Window(8), Window(7, 1)):
        if other.sinks and "sinks" not in PLACES[place].host.provides:
            continue
        others = made_in(PLACES[place], Case(EXAMPLES["constant"], other))
        assert not agree([(made, by) for (made, _), (_, by) in zip(right, others, strict=True)])


# A policy of one's own


@dataclass(frozen=True)
class Steep:
    """Scales by so much more with every Key."""

    rate: float

    def gain(self, keys: Tensor) -> Tensor:
        return self.rate * keys.float()


@pytest.fixture
def steep() -> Iterator[Example]:
    """Registered here alone, and asked for by its name."""
    registry.register("scale", "test_steep", "steep")(Steep)
    asked = DraftSettings.parse("steep@0.05").scale
    yield Example(lambda layers: asked, lambda keys, layer: 0.05 * keys)
    registry.forget("test_steep")


@pytest.mark.parametrize("place", PLACES)
def test_a_policy_of_ones_own_in_every_host(place: str, steep: Example, made_in: Runner) -> None:
    for view in (None, Window(7)):
        assert agree(made_in(PLACES[place], Case(steep, view)))
        assert not agree(made_in(PLACES[place], Case(steep, view, off=1)))


def test_a_policy_of_ones_own_by_its_name(
    steep: Example, llama: Tiny, saved: Checkpoints, run: Run
) -> None:
    """Where people ask: an arm of the lab, its command line, a settings file, a vLLM config."""
    (arm,) = arms_of(["steep@0.05+window@30"], {"": DraftSettings()})
    assert arm.settings == DraftSettings(Steep(0.05), Window(30))
    session = Session(llama.target, make_drafter(llama.target))
    session.use(arm)
    list(session.generate(llama.text[:PROMPT], 40))
    assert session.tokens == llama.text[: PROMPT + 40]
    both = ("--target", saved.target, "--drafter", saved.drafter, "--max-new-tokens", 12)
    said = run("generate", "w9 w10", "--arm", "steep@0.05", "--json", *both)
    assert said.code == 0 and json.loads(said.out)["arm"] == "steep@0.05"
    for asked in ("steep@0.05", {"kind": "test_steep", "rate": 0.05}):
        settings = settings_in(config(asked))
        assert settings is not None and settings.scale == Steep(0.05)
    written = json.loads(json.dumps(settings.to_dict()))
    with attach(nn.ModuleList([PlainAttention()]), DraftSettings.from_dict(written)) as attached:
        assert attached.settings.scale == Steep(0.05)
