"""What an engine's user may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharpdraft.errors import SharpDraftError
from sharpdraft.method.policies import Constant, FixedSlope, LayerSlopes
from sharpdraft.method.settings import (
    DraftSettings,
    FixedLength,
    Window,
    asked_settings,
    write_settings,
)

OWN = DraftSettings(FixedSlope(700), Window(64, 2), FixedLength(3))


@pytest.fixture
def drafter(tmp_path: Path) -> str:
    write_settings(tmp_path / "sharpdraft.json", OWN)
    return str(tmp_path)


def test_the_drafters_own(drafter: str) -> None:
    assert asked_settings(True, drafter) == OWN


@pytest.mark.parametrize("drafter", [None, "somebody/drafter"])
def test_a_drafter_without_any(drafter: str | None) -> None:
    with pytest.raises(SharpDraftError, match=r"has no sharpdraft.json .*: give \{.reference"):
        asked_settings(True, drafter)


def test_a_path(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_settings(drafter, None) == OWN
    assert asked_settings(f"{drafter}/sharpdraft.json", None) == OWN
    monkeypatch.setenv("HOME", drafter)
    assert asked_settings("~", None) == OWN
    for missing in (f"{drafter}/other.json", f"{drafter}/none"):
        with pytest.raises(SharpDraftError, match="is no settings file"):
            asked_settings(missing, None)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("frozen", DraftSettings()),
        ("fixed@1.2", DraftSettings(Constant(1.2))),
        ("sinks@4+window@512+sharpdraft@300", DraftSettings(FixedSlope(300), Window(512, 4))),
        ({"reference": 512}, DraftSettings(FixedSlope(512))),
        ({"reference": 512, "slope": 3}, DraftSettings(FixedSlope(512, 3))),
        ({"kind": "constant", "scale": 1.2}, DraftSettings(Constant(1.2))),
        (
            {"kind": "layer_slopes", "reference": 99, "slopes": [3, 4]},
            DraftSettings(LayerSlopes(99, (3, 4))),
        ),
        ({"scale": {"kind": "constant", "scale": 1.2}}, DraftSettings(Constant(1.2))),
        ({"view": {"kind": "window", "keys": 64}}, DraftSettings(view=Window(64))),
        (OWN.to_dict(), OWN),
        (
            {"policy": {"reference": 512}, "block": 4},
            DraftSettings.parse("sharpdraft@512+drafts@3"),
        ),
    ],
)
def test_text_and_mappings(asked: object, expected: DraftSettings) -> None:
    assert asked_settings(asked, None) == expected


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (None, 'asked for None: give true, "frozen", the path of a sharpdraft.json'),
        (False, "asked for False: give true"),
        (1, "asked for 1: give true"),
        ("", "asked for '': give true"),
        ({}, "asked for {}: give true"),
        ([], r"asked for \[\]: give true"),
        ("windows@5", "windows@5 is no settings file"),
        ("window@0", "'window@0': keys must be an integer of at least 1"),
        ("window@64+window@32", "view is named twice"),
        ({"n0": 5}, "settings are wrong: scale, kind fixed_slope: no field 'n0'"),
        ({"kind": "log"}, "settings are wrong: scale: .* one of constant, fixed_slope"),
        ({"view": {"keys": 64}}, "settings are wrong: view: give a mapping with .kind., one of w"),
        ({"scale": {"kind": "constant", "scale": 2}, "adapt": 1}, "have no part 'adapt'"),
    ],
)
def test_what_is_refused(asked: object, says: str) -> None:
    with pytest.raises(SharpDraftError, match=says) as caught:
        asked_settings(asked, None)
    assert "\n" not in str(caught.value)
