"""Kinds are known under their names and words once they are registered, and written as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpdraft import SharpDraftError
from sharpdraft.method import registry
from sharpdraft.method.policies import Constant, FixedSlope, LayerSlopes
from sharpdraft.method.registry import Part
from sharpdraft.method.settings import FixedLength, Window
from support.kinds import STRATEGIES

PARTS: tuple[Part, ...] = ("scale", "view", "length")


@dataclass(frozen=True)
class Ramp:
    """A kind as simple as it may be."""

    rise: float
    start: int = 10


@pytest.fixture
def ramp() -> Iterator[type[Ramp]]:
    yield registry.register("scale", "test_ramp", "ramp")(Ramp)
    registry.forget("test_ramp")


def test_every_registered_kind_is_tested() -> None:
    known = {kind.name for part in PARTS for kind in registry.kinds(part)}
    assert known == set(STRATEGIES), "add an example of the kind to tests/support/kinds.py"


@pytest.mark.parametrize("name", STRATEGIES)
@given(data=st.data())
def test_every_kind_survives_files_and_command_lines(name: str, data: st.DataObject) -> None:
    value = data.draw(STRATEGIES[name])
    kind = registry.kind_of(value)
    assert kind.name == name and type(value) is kind.cls
    written = registry.to_dict(value)
    assert written["kind"] == name and registry.from_dict(kind.part, written) == value
    word, _, text = registry.to_text(value).partition("@")
    assert word == kind.word
    again = registry.from_text(kind.part, word, text, "here")
    assert again == value and hash(again) == hash(value)
    said = registry.describe(value)
    assert said and "\n" not in said


def test_as_files_have_it() -> None:
    assert registry.to_dict(LayerSlopes(512, (3.0, 5.0))) == {
        "kind": "layer_slopes",
        "reference": 512,
        "slopes": [3.0, 5.0],
        "top_k": 32,
        "max_scale": FixedSlope(512).max_scale,
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (FixedSlope(512), "sharpdraft@512"),
        (FixedSlope(512, 3), "sharpdraft@512:slope=3"),
        (FixedSlope(512, top_k=16, max_scale=1e22), "sharpdraft@512:top_k=16:max_scale=1e22"),
        (Constant(1.2), "fixed@1.2"),
        (LayerSlopes(512, (3, 4.5)), "slopes@512:slopes=3/4.5"),
        (LayerSlopes(512, (3,)), "slopes@512:slopes=3/"),
        (Window(1024), "window@1024"),
        (Window(1024, 4), "window@1024:sinks=4"),
        (FixedLength(5), "drafts@5"),
    ],
)
def test_as_command_lines_have_it(value: object, text: str) -> None:
    assert registry.to_text(value) == text


def test_a_kind_is_known_while_it_is_registered(ramp: type[Ramp]) -> None:
    assert [kind.name for kind in registry.kinds("scale")][-1] == "test_ramp"
    assert registry.words("scale")[-1] == "ramp@RISE"
    assert registry.from_dict("scale", {"kind": "test_ramp", "rise": 2}) == Ramp(2)
    assert registry.from_text("scale", "ramp", "2:start=5", "here") == Ramp(2, 5)
    assert registry.from_text("scale", "ramp", "2:5", "here") == Ramp(2, 5)
    assert registry.describe(Ramp(2, 5)) == registry.to_text(Ramp(2, 5)) == "ramp@2:start=5"
    registry.forget("test_ramp")
    try:
        with pytest.raises(SharpDraftError, match="register its class"):
            registry.kind_of(Ramp(2))
        assert "ramp@RISE" not in registry.words("scale")
    finally:
        registry.register("scale", "test_ramp", "ramp")(Ramp)


@pytest.mark.parametrize(
    ("name", "word"), [("fixed_slope", "other"), ("other", "window"), ("window", "sharpdraft")]
)
def test_a_name_or_word_that_is_taken(name: str, word: str) -> None:
    with pytest.raises(ValueError, match="registered already"):
        registry.register("scale", name, word)(Ramp)
    assert all(kind.cls is not Ramp for part in PARTS for kind in registry.kinds(part))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, 'scale: give a mapping with "kind", one of constant, fixed_slope, layer_slopes'),
        ([], "scale: give a mapping"),
        (None, "scale: give a mapping"),
        ({"kind": "log_length"}, "scale: .* got {'kind': 'log_length'}"),
        ({"kind": "window", "keys": 5}, "scale: .* one of constant, fixed_slope"),
        ({"kind": ["constant"], "scale": 1.0}, "scale: give a mapping"),
        ({"kind": "fixed_slope"}, "scale, kind fixed_slope: reference is missing"),
        ({"kind": "layer_slopes", "reference": 99}, "scale, kind layer_slopes: slopes is missing"),
        ({"kind": "constant"}, "scale, kind constant: scale is missing"),
        (
            {"kind": "constant", "scale": 1.0, "slop": 5},
            "scale, kind constant: no field 'slop'; known are scale",
        ),
        ({"kind": "constant", "scale": 1.0, 7: 5}, "no field '7'"),
        (
            {"kind": "layer_slopes", "reference": 99, "slopes": 5},
            "kind layer_slopes: slopes must name a slope for each layer, got 5",
        ),
        (
            {"kind": "layer_slopes", "reference": 99, "slopes": [5, [6]]},
            r"kind layer_slopes: slope must be a positive finite number, got \[6\]",
        ),
    ],
)
def test_files_that_are_refused(values: object, says: str) -> None:
    with pytest.raises(SharpDraftError, match=says) as caught:
        registry.from_dict("scale", values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "text", "says"),
    [
        ("sharpdraft", "", "here: reference is missing"),
        ("sharpdraft", "x", "here: 'x' is no number"),
        ("sharpdraft", "512:", "here: '' is no number"),
        ("sharpdraft", "1e3", "here: reference must be an integer, got 1000.0"),
        ("sharpdraft", "512/", "here: reference must be an integer"),
        ("sharpdraft", "512:slop=3", "here: no field 'slop'; known are reference, slope"),
        ("sharpdraft", "512:=3", "here: no field ''"),
        ("sharpdraft", "512:reference=600", "here: reference is given twice"),
        ("sharpdraft", "512:slope=3:slope=4", "here: slope is given twice"),
        ("sharpdraft", "512:1:1:1:1", "here: sharpdraft has 4 fields: reference, slope, top_k"),
        ("slopes", "512:slopes=/", "here: slopes must name a slope for each layer"),
        ("slopes", "512:slopes=1/x", "here: 'x' is no number"),
    ],
)
def test_command_lines_that_are_refused(word: str, text: str, says: str) -> None:
    with pytest.raises(SharpDraftError, match=says) as caught:
        registry.from_text("scale", word, text, "here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call", [registry.to_dict, registry.to_text, registry.kind_of])
def test_what_is_of_no_kind_is_not_written(call: object) -> None:
    with pytest.raises(SharpDraftError, match="of no registered kind: register its class"):
        call(object())  # type: ignore[operator]
