"""Figures that are what they say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sharpdraft.lab.figure import figure
from sharpdraft.lab.plan import EDGES
from sharpdraft.lab.statistics import Cell, Estimate, summarise
from sharpdraft.lab.table import table


def row_of(
    session: str, turn: int, context: int, accepted: dict[str, list[int]], seconds: dict[str, float]
) -> Any:
    arms = {
        name: {
            "tokens": 40,
            "seconds": seconds[name],
            "rounds": [(context + i, 5, a) for i, a in enumerate(accepted.get(name, []))],
            "draft_seconds": 0.1,
            "verify_seconds": 0.1,
        }
        for name in seconds
    }
    replayed = {"sharpdraft": {**arms["sharpdraft"], "mass": [(context, 0.25 * (turn + 1))]}}
    return {
        "session": session,
        "turn": turn,
        "context": context,
        "tokens": [1] * 40,
        "arms": arms,
        "differences": {},
        "replayed": replayed,
    }


def rows_of(sessions: int) -> list[Any]:
    seconds = {"ar": 4.0, "frozen": 2.0, "sharpdraft": 1.0}
    rows = []
    for number in range(sessions):
        name = f"s{number}"
        rows.append(row_of(name, 0, 100, {"frozen": [0, 1], "sharpdraft": [1, number]}, seconds))
        rows.append(
            row_of(name, 1, 900, {"frozen": [0, 0, 0], "sharpdraft": [3]}, seconds | {"ar": 2.0})
        )
    return rows


def test_summary_of_known_rows() -> None:
    cells = {(c.bucket, c.arm): c for c in summarise(rows_of(4), EDGES)}
    assert list(cells) == [(b, a) for b in (0, 1) for a in ("ar", "frozen", "sharpdraft")]
    ar, frozen, sharp = (cells[0, name] for name in ("ar", "frozen", "sharpdraft"))
    assert (ar.turns, ar.tokens, ar.mal, ar.speedup, ar.gain, ar.mass) == (
        4,
        160,
        None,
        None,
        None,
        None,
    )
    assert ar.speed == Estimate(10.0, 10.0, 10.0)
    assert frozen.speed == Estimate(20.0, 20.0, 20.0) and frozen.speedup == Estimate(2.0, 2.0, 2.0)
    assert frozen.mal == Estimate(1.5, 1.5, 1.5) and frozen.gain is None
    assert sharp.speedup is not None and sharp.speedup.value == 4.0
    assert sharp.mal is not None and sharp.mal.value == pytest.approx(1 + (4 + 0 + 1 + 2 + 3) / 8)
    assert sharp.gain is not None and sharp.gain.value == pytest.approx(sharp.mal.value - 1.5)
    # Of the draws of four sessions from four, the middle 95 %: far from constant, and around the
    # value.
    assert sharp.mal.low is not None and sharp.mal.high is not None
    assert (
        1.5 < sharp.mal.low < sharp.mal.value - 0.2 < sharp.mal.value + 0.2 < sharp.mal.high < 3.0
    )
    later = cells[1, "sharpdraft"]
    assert later.mal == Estimate(4.0, 4.0, 4.0) and later.gain == Estimate(3.0, 3.0, 3.0)
    assert later.speedup == Estimate(2.0, 2.0, 2.0) and later.mass == Estimate(0.5, 0.5, 0.5)
    assert cells[0, "sharpdraft"].mass == Estimate(0.25, 0.25, 0.25)


def test_interval_is_the_percentiles_of_resampled_sessions() -> None:
    rows = [row_of(f"s{n}", 0, 50, {"sharpdraft": [n]}, {"sharpdraft": 1.0}) for n in range(30)]
    (cell,) = summarise(rows, (100,))
    assert cell.mal is not None and cell.mal.low is not None and cell.mal.high is not None
    error = 1.96 * np.std(np.arange(30)) / math.sqrt(30)
    assert cell.mal.value == pytest.approx(15.5)
    assert cell.mal.value - cell.mal.low == pytest.approx(error, rel=0.15)
    assert cell.mal.high - cell.mal.value == pytest.approx(error, rel=0.15)


def test_fewer_than_three_sessions_have_no_interval() -> None:
    for cell in summarise(rows_of(2), EDGES):
        for estimate in (cell.speed, cell.speedup, cell.mal, cell.gain, cell.mass):
            assert estimate is None or (estimate.low is None and estimate.high is None)
    assert str(Estimate(1.234)) == "1.23" and str(Estimate(1.234, 1.0, 2.0)) == "1.23 [1.00, 2.00]"


def test_summary_of_replayed_arms_and_of_what_lies_beyond() -> None:
    rows = rows_of(3)
    for row in rows:
        row["replayed"]["fixed@1.2"] = {"tokens": 40, "rounds": [(row["context"], 5, 2)]}
        row["replayed"]["frozen"] = {"tokens": 40, "rounds": [(row["context"], 5, 1)]}
    rows.append(row_of("s9", 0, 9000, {}, {"ar": 1.0, "sharpdraft": 1.0}))
    cells = {(c.bucket, c.arm): c for c in summarise(rows, EDGES)}
    assert {bucket for bucket, _ in cells} == {0, 1}
    fixed = cells[0, "fixed@1.2"]
    assert (fixed.speed, fixed.speedup) == (None, None)
    assert fixed.mal == Estimate(3.0, 3.0, 3.0) and fixed.gain == Estimate(1.0, 1.0, 1.0)
    assert [arm for bucket, arm in cells if bucket == 0] == [
        "ar",
        "frozen",
        "sharpdraft",
        "fixed@1.2",
    ]
    assert summarise([], EDGES) == []


def text_of(cells: list[Cell]) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(table(cells, EDGES, "a title"))
    return capture.get()


def test_table() -> None:
    text = text_of(summarise(rows_of(4), EDGES))
    for part in (
        "a title",
        "0-512",
        "512-1K",
        "frozen",
        "2.00 [2.00, 2.00]",
        "MAL - Frozen's",
        "top-32 mass",
    ):
        assert part in text
    assert text.count("0-512") == 1
    only_ar = [cell for cell in summarise(rows_of(2), EDGES) if cell.arm == "ar"]
    assert "MAL" not in text_of(only_ar) and "tokens/s" in text_of(only_ar)


def test_figure_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, count in enumerate((1, 4)):
        path = tmp_path / "new" / f"{number}.png"
        figure(summarise(rows_of(count), EDGES), EDGES, path, "a title")
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    rows = rows_of(1)
    for row in rows:
        row["arms"]["sharpdraft"][
            "rounds"
        ] = []  # Nothing drafted: not a number, which must not break a picture.
    figure(summarise(rows, EDGES), EDGES, tmp_path / "nan.png", "nothing drafted")
