"""The contract: every kind of policy and every view does in every host what it does by hand.

A kind joins by being registered: it then needs an example in `support.contract`, with its gain
written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpdraft.adapters.attach import ATTACH, attach
from sharpdraft.adapters.vllm.request import settings_in
from sharpdraft.decode.session import Session
from sharpdraft.errors import SharpDraftError
from sharpdraft.lab.arms import arms_of
from sharpdraft.method import registry
from sharpdraft.method.settings import DraftSettings, Window
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.kernels import build
from support.contract import EXAMPLES, PLACES, VIEWS, Both, Case, Example, Place
from support.tiny import Tiny

KINDS = ["none", *(kind.name for kind in registry.kinds("scale"))]
Runner = Callable[[Place, Case], list[Both]]


@pytest.fixture
def run(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs a case in a host, with kernels or without."""

    def call(place: Place, case: Case) -> list[Both]:
        if place.compiled is False:
            monkeypatch.setattr(build, "library", lambda lanes: None)
        elif place.compiled and build.library(8) is None:
            pytest.skip("no C++ compiler here")
        return place.run(CausalLM.of(llama.model), case)

    return call


def agree(found: list[Both]) -> bool:
    return all(torch.allclose(made, right, rtol=1e-3, atol=2e-3) for made, right in found)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_every_kind_and_view_in_every_host(place: str, kind: str, view: str, run: Runner) -> None:
    assert kind in EXAMPLES, f"add an example of {kind} to support/contract.py"
    case, host = Case(EXAMPLES[kind], VIEWS[view]), PLACES[place].host
    window = VIEWS[view]
    if window is not None and window.sinks and "sinks" not in host.provides:
        with pytest.raises(SharpDraftError, match=r"^view \(window@.*sinks"):
            run(PLACES[place], case)
        return
    for made, right in run(PLACES[place], case):
        torch.testing.assert_close(made, right, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("view", ["all", "window"])
@pytest.mark.parametrize("place", PLACES)
def test_a_key_too_many_in_the_count_is_noticed(place: str, view: str, run: Runner) -> None:
    for off in (-1, 1):
        assert not agree(run(PLACES[place], Case(EXAMPLES["fixed_slope"], VIEWS[view], off)))


@pytest.mark.parametrize("place", PLACES)
def test_a_key_too_many_in_the_window_is_noticed(place: str, run: Runner) -> None:
    right = run(PLACES[place], Case(EXAMPLES["constant"], Window(7)))
    for other in (Window(6), Window(8), Window(7, 1)):
        if other.sinks and "sinks" not in PLACES[place].host.provides:
            continue
        others = run(PLACES[place], Case(EXAMPLES["constant"], other))
        assert not agree([(made, by) for (made, _), (_, by) in zip(right, others, strict=True)])
