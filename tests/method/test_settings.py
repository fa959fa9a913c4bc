"""`sharpdraft.json` and its text: what is read, written, composed and refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from torch import Tensor

from sharpdraft.errors import SharpDraftError
from sharpdraft.method.policies import Constant, FixedSlope, LayerSlopes
from sharpdraft.method.settings import (
    REPORTED,
    DraftSettings,
    FixedLength,
    Window,
    known_words,
    read_settings,
    write_settings,
)
from sharpdraft.method.visible import View
from support.kinds import draft_settings

PAPER = FixedSlope(reference=2048)
ALL = DraftSettings(FixedSlope(512), Window(1024, 4), FixedLength(5))
quick = settings(max_examples=150, deadline=None)


@quick
@given(draft_settings)
def test_files_and_text_say_the_same_as_the_object(given_settings: DraftSettings) -> None:
    written = json.loads(json.dumps(given_settings.to_dict()))
    assert DraftSettings.from_dict(written) == given_settings
    text = given_settings.text()
    assert DraftSettings.parse(text) == given_settings
    assert not set(text) & set(" \n'\"{}")
    said = given_settings.describe()
    assert said and "\n" not in said
    assert (text == "frozen") == (given_settings == DraftSettings()) == (not written)


def test_as_files_have_it() -> None:
    assert ALL.to_dict() == {
        "scale": {
            "kind": "fixed_slope",
            "reference": 512,
            "slope": 5.0,
            "top_k": 32,
            "max_scale": math.exp(0.5),
        },
        "view": {"kind": "window", "keys": 1024, "sinks": 4},
        "length": {"kind": "fixed", "drafts": 5},
    }
    assert DraftSettings(Constant(1.5)).to_dict() == {"scale": {"kind": "constant", "scale": 1.5}}
    assert DraftSettings.from_dict({"scale": {"kind": "fixed_slope", "reference": 2048}}) == (
        DraftSettings(PAPER)
    )
    assert DraftSettings.from_dict({}) == DraftSettings()


def test_as_command_lines_have_it() -> None:
    assert ALL.text() == "sharpdraft@512+sinks@4+window@1024+drafts@5"
    assert DraftSettings().text() == "frozen"
    assert DraftSettings(view=Window(508)).text() == "window@508"


def test_one_line_for_people() -> None:
    assert ALL.describe() == (
        "fixed slope: N0 = 512, k = 32, s = 5, cap 1.649; "
        "only the last 1024 Keys are seen, and the first 4; 5 drafts a round"
    )
    assert DraftSettings().describe() == "the drafter as released"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("frozen", DraftSettings()),
        ("sharpdraft@256", DraftSettings(FixedSlope(256))),
        ("sharpdraft@256:slope=3", DraftSettings(FixedSlope(256, 3))),
        ("fixed@1.2", DraftSettings(Constant(1.2))),
        ("slopes@512:slopes=3/4/5", DraftSettings(LayerSlopes(512, (3, 4, 5)))),
        ("window@512", DraftSettings(view=Window(512))),
        ("window@1024+sharpdraft@512", DraftSettings(FixedSlope(512), Window(1024))),
        ("sharpdraft@512+window@1024", DraftSettings(FixedSlope(512), Window(1024))),
        ("sinks@4+window@508", DraftSettings(view=Window(508, 4))),
        ("window@508+sinks@4", DraftSettings(view=Window(508, 4))),
        ("window@508:sinks=4", DraftSettings(view=Window(508, 4))),
        ("window@508:4", DraftSettings(view=Window(508, 4))),
        (" sharpdraft@512 + drafts@3 ", DraftSettings(FixedSlope(512), length=FixedLength(3))),
        ("frozen+drafts@3", DraftSettings(length=FixedLength(3))),
    ],
)
def test_text_composes(text: str, expected: DraftSettings) -> None:
    assert DraftSettings.parse(text) == expected


def test_what_a_drafter_recommends() -> None:
    own = DraftSettings(FixedSlope(700), length=FixedLength(3))
    assert DraftSettings.parse("sharpdraft", own) == own
    assert DraftSettings.parse("sharpdraft+window@64", own) == DraftSettings(
        own.scale, Window(64), own.length
    )
    assert DraftSettings.parse("sharpdraft@512", own) == DraftSettings(FixedSlope(512))
    assert DraftSettings.parse("sharpdraft", DraftSettings()) == DraftSettings()
    for text in ("sharpdraft+drafts@4", "drafts@4+sharpdraft"):
        assert DraftSettings.parse(text, own) == replace(own, length=FixedLength(4))
    windowed = DraftSettings(FixedSlope(700), Window(64))
    assert DraftSettings.parse("sharpdraft+window@32", windowed).view == Window(32)
    assert DraftSettings.parse("sharpdraft+sinks@4", windowed).view == Window(64, 4)
    for text, says in [
        ("sharpdraft+fixed@2", "scale is named twice"),
        ("sharpdraft+sharpdraft", "'sharpdraft' in .*: named twice"),
    ]:
        with pytest.raises(SharpDraftError, match=says):
            DraftSettings.parse(text, own)
    with pytest.raises(SharpDraftError, match="named twice"):
        DraftSettings.parse("sharpdraft+sharpdraft", DraftSettings())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'': unknown; known are frozen, sharpdraft, "),
        ("ar+window@5", "'ar' in 'ar[+]window@5': unknown; known are frozen"),
        ("windows@512", "'windows@512': unknown"),
        ("frozen@1", "'frozen@1': unknown"),
        ("window@64+", "'' in 'window@64[+]': unknown"),
        ("sharpdraft", "'sharpdraft': which N0 is not known here; give one, as sharpdraft@512"),
        ("sharpdraft@", "'sharpdraft@': reference is missing"),
        ("sharpdraft@30", "'sharpdraft@30': reference .N0. must be above top_k"),
        ("fixed@0", "'fixed@0': scale must be a positive finite number"),
        ("window", "'window': keys is missing"),
        ("window@0", "'window@0': keys must be an integer of at least 1, got 0"),
        ("window@1.5", "'window@1.5': keys must be an integer of at least 1, got 1.5"),
        ("window@512+window@256", "'window@256' in .*: view is named twice"),
        ("sharpdraft@512+fixed@1.2", "'fixed@1.2' in .*: scale is named twice"),
        ("drafts@3+drafts@3", "length is named twice"),
        ("drafts@0", "drafts must be an integer of at least 1, got 0"),
        ("sinks@4", "'sinks@4': sinks need a window, .*: add window@KEYS"),
        ("sinks@4+sharpdraft@512", "sinks need a window"),
        ("sinks@4+sinks@4+window@64", "'sinks@4' in .*: sinks are named twice"),
        ("sinks@4+window@64:sinks=2", "'sinks@4[+]window@64:sinks=2': sinks are named twice"),
        ("sinks@0+window@64", "'sinks@0' in .*: give a number of Keys, at least 1"),
        ("sinks@x+window@64", "'sinks@x' in .*: give a number of Keys"),
        ("sinks+window@64", "'sinks' in .*: give a number of Keys"),
        ("window@64:sinks=-1", "sinks must be an integer of at least 0, got -1"),
    ],
)
def test_text_that_is_refused(text: str, says: str) -> None:
    with pytest.raises(SharpDraftError, match=says) as caught:
        DraftSettings.parse(text)
    assert "\n" not in str(caught.value)


def test_every_word_that_is_known_is_named() -> None:
    assert known_words() == [
        "frozen",
        "sharpdraft",
        "fixed@SCALE",
        "sharpdraft@REFERENCE",
        "slopes@REFERENCE:SLOPES",
        "window@KEYS",
        "drafts@DRAFTS",
        "sinks@KEYS",
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"policy": {"kind": "fixed_slope", "reference": 2048}}, DraftSettings(PAPER)),
        ({"policy": {"reference": 2048}}, DraftSettings(PAPER)),
        ({"policy": {"kind": "constant", "scale": 1.5}}, DraftSettings(Constant(1.5))),
        (
            {"policy": {"kind": "fixed_slope", "reference": 2048}, "block": 4},
            DraftSettings(PAPER, length=FixedLength(3)),
        ),
        ({"block": 2}, DraftSettings(length=FixedLength(1))),
        (
            {"policy": {"reference": 2048}, "view": {"kind": "window", "keys": 64}},
            DraftSettings(PAPER, Window(64)),
        ),
    ],
)
def test_old_files_are_read(values: dict[str, Any], expected: DraftSettings) -> None:
    assert DraftSettings.from_dict(values) == expected


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], "settings are a mapping of scale, view, length; got"),
        (None, "settings are a mapping"),
        ({"scales": {}}, "settings have no part 'scales'; known are scale, view, length"),
        ({"adapt": {"kind": "lora"}}, "no part 'adapt'"),
        ({"scale": None}, "scale: give a mapping"),
        ({"scale": {"kind": "log_length"}}, "scale: .*one of constant, fixed_slope"),
        ({"view": {"kind": "constant", "scale": 1}}, 'view: give a mapping with "kind", one of w'),
        ({"view": [{"kind": "window", "keys": 4}] * 2}, "view: give a mapping"),
        ({"view": {"kind": "window"}}, "view, kind window: keys is missing"),
        ({"view": {"kind": "window", "keys": 0}}, "view, kind window: keys must be an integer of"),
        ({"view": {"kind": "window", "keys": True}}, "keys must be an integer of at least 1"),
        (
            {"view": {"kind": "window", "keys": 4, "sinks": -1}},
            "view, kind window: sinks must be an integer of at least 0, got -1",
        ),
        ({"view": {"kind": "window", "sinks": 4}}, "view, kind window: keys is missing"),
        ({"length": {"kind": "fixed", "drafts": 0}}, "length, kind fixed: drafts must be an"),
        ({"length": 5}, "length: give a mapping"),
        ({"policy": {}}, "scale: give a mapping"),
        ({"policy": []}, "scale: give a mapping"),
        ({"policy": {"kind": "fixed_slope", "n0": 5}}, "scale, kind fixed_slope: no field 'n0'"),
        ({"block": 1}, "block is 1: it must be an integer of at least 2"),
        ({"block": "4"}, "block is '4': it must be an integer"),
        ({"block": True}, "block is True"),
        (
            {"policy": {"reference": 2048}, "scale": {"kind": "constant", "scale": 2}},
            "policy is what scale was once called: give scale alone",
        ),
        (
            {"block": 4, "length": {"kind": "fixed", "drafts": 2}},
            "block is what length was once called: give length alone",
        ),
    ],
)
def test_files_that_are_refused(values: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(SharpDraftError, match=says) as caught:
        DraftSettings.from_dict(values)
    assert "\n" not in str(caught.value)
    path = tmp_path / "sharpdraft.json"
    path.write_text(json.dumps(values))
    with pytest.raises(SharpDraftError, match=says) as caught:
        read_settings(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "sharpdraft.json"
    for each in (ALL, DraftSettings(), DraftSettings(LayerSlopes(99, (3.0, 5.5)))):
        write_settings(path, each)
        assert read_settings(path) == each
        assert path.read_text().endswith("}\n")


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe"])
def test_a_file_that_is_missing_or_broken(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "sharpdraft.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        SharpDraftError, match=r"is no settings file .*: mend or remove it"
    ) as error:
        read_settings(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


class Nameless:
    """A policy of no registered kind."""

    def gain(self, keys: Tensor) -> Tensor:
        return keys.float()


@pytest.mark.parametrize("scale", [object(), Nameless()])
def test_what_is_of_no_kind_is_not_written(scale: Any, tmp_path: Path) -> None:
    path = tmp_path / "sharpdraft.json"
    with pytest.raises(SharpDraftError, match="of no registered kind: register its class"):
        write_settings(path, DraftSettings(scale))
    assert not path.exists()


def test_what_settings_say() -> None:
    assert (ALL.drafts, DraftSettings().drafts) == (5, None)
    assert [each.acts for each in (ALL, DraftSettings(), DraftSettings(length=FixedLength(5)))] == [
        True,
        False,
        False,
    ]
    assert DraftSettings(view=Window(5)).acts and DraftSettings(Constant(1.0)).acts


def test_views_of_layers() -> None:
    own = (View(), View(False), View(False, 30), View(True, 9))
    assert DraftSettings().views(own) == own
    assert DraftSettings(view=Window(20, 4)).views(own) == (
        View(True, 20, 4),
        View(False, 20, 4),
        View(False, 20),
        View(True, 9),
    )


def test_reported_settings() -> None:
    assert {name: each.text() for name, each in REPORTED.items()} == {
        "dflash": "sharpdraft@2048",
        "dflash-glm": "sharpdraft@4096",
        "pard": "sharpdraft@8192",
    }
