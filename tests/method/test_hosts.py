"""What settings need of the host that they are put on, and what is refused there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import Tensor

from sharpdraft.errors import SharpDraftError
from sharpdraft.method import registry
from sharpdraft.method.policies import Constant, FixedSlope, LayerSlopes
from sharpdraft.method.scale import LayerPolicy, Policy, needs_of, policy_at
from sharpdraft.method.settings import DraftSettings, FixedLength, Host, Window

PAPER = FixedSlope(reference=2048)
ALL = DraftSettings(FixedSlope(512), Window(1024, 4), FixedLength(5))


@dataclass(frozen=True)
class Sharp:
    """A policy that needs scores, as an entropy rule would."""

    needs: ClassVar[tuple[str, ...]] = ("keys", "scores")

    target: float = 1.0

    def gain(self, keys: Tensor) -> Tensor:
        return 0 * keys.float()


@pytest.fixture
def sharp() -> Iterator[DraftSettings]:
    registry.register("scale", "test_sharp", "sharp")(Sharp)
    yield DraftSettings(Sharp(2.0))
    registry.forget("test_sharp")


def test_a_host_that_can_do_all(sharp: DraftSettings) -> None:
    host = Host("it", ("keys", "layer", "scores", "window", "sinks", "length"))
    for each in (ALL, sharp, DraftSettings(), DraftSettings(LayerSlopes(99, (3, 4, 5)))):
        each.check(host)
        each.check(host, layers=3, drafts=5)


@pytest.mark.parametrize(
    ("text", "provides", "says"),
    [
        ("sharp@2", "keys layer", r"scale \(sharp@2.0\): it has no scores to give"),
        ("sharpdraft@512", "layer", r"scale \(sharpdraft@512\): it has no keys to give"),
        ("slopes@99:slopes=1/2/3", "keys", r"scale \(slopes@99:slopes=1/2/3\): it has no layer to"),
        ("window@64", "keys sinks", r"view \(window@64\): its windows are the checkpoint's$"),
        ("sinks@4+window@64", "window", r"view \(sinks@4[+]window@64\): it has no sinks to give"),
        ("drafts@3", "keys", r"length \(drafts@3\): it has no length to give"),
    ],
)
def test_what_a_host_cannot_do_is_refused_by_name(
    text: str, provides: str, says: str, sharp: DraftSettings
) -> None:
    host = Host("it", provides.split(), {"window": "its windows are the checkpoint's"})
    asked = sharp if text == "sharp@2" else DraftSettings.parse(text)
    with pytest.raises(SharpDraftError, match=says) as caught:
        asked.check(host, layers=3, drafts=3)
    assert "\n" not in str(caught.value)


def test_what_makes_no_sense_for_a_drafter() -> None:
    host = Host("it", ("keys", "layer", "window", "sinks", "length"))
    slopes = DraftSettings(LayerSlopes(99, (3, 4)))
    slopes.check(host)
    slopes.check(host, layers=2)
    for layers in (1, 3):
        with pytest.raises(
            SharpDraftError,
            match=rf"scale \(slopes@99:slopes=3/4\): it is for 2 layers, .* drafter has {layers}$",
        ):
            slopes.check(host, layers=layers)
    window = DraftSettings(view=Window(4, 2))
    window.check(host)
    window.check(host, drafts=3)
    with pytest.raises(
        SharpDraftError, match=r"view \(window@4\): a row would not see all of its own block of 5"
    ):
        window.check(host, drafts=4)
    # What the settings say of the length comes before what the drafter does by default.
    DraftSettings(view=Window(4), length=FixedLength(3)).check(host, drafts=9)
    with pytest.raises(SharpDraftError, match="block of 5 tokens"):
        DraftSettings(view=Window(4), length=FixedLength(4)).check(host, drafts=3)


def test_what_policies_need_and_are_in_each_layer() -> None:
    slopes = LayerSlopes(99, (3, 4), 16, 2.0)
    assert needs_of(None) == () and needs_of(PAPER) == needs_of(Constant(2)) == ("keys",)
    assert needs_of(slopes) == ("keys", "layer")
    assert policy_at(None, 1) is None and policy_at(PAPER, 1) is PAPER
    assert policy_at(slopes, 1) == FixedSlope(99, 4, 16, 2.0)
    assert isinstance(slopes, LayerPolicy) and not isinstance(slopes, Policy)
    assert not isinstance(PAPER, LayerPolicy)
