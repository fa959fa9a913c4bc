"""Figures that are what they say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sharpdraft.errors import SharpDraftError
from sharpdraft.lab.buckets import label
from sharpdraft.lab.figure import figure
from sharpdraft.lab.statistics import Cell, Estimate, summarise
from sharpdraft.lab.table import table, width_of


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
    cells = {(c.bucket, c.arm): c for c in summarise(rows_of(4))}
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
    (cell,) = summarise(rows)
    assert cell.mal is not None and cell.mal.low is not None and cell.mal.high is not None
    error = 1.96 * np.std(np.arange(30)) / math.sqrt(30)
    assert cell.mal.value == pytest.approx(15.5)
    assert cell.mal.value - cell.mal.low == pytest.approx(error, rel=0.15)
    assert cell.mal.high - cell.mal.value == pytest.approx(error, rel=0.15)


def test_fewer_than_three_sessions_have_no_interval() -> None:
    for cell in summarise(rows_of(2)):
        for estimate in (cell.speed, cell.speedup, cell.mal, cell.gain, cell.mass):
            assert estimate is None or (estimate.low is None and estimate.high is None)
    assert str(Estimate(1.234)) == "1.23" and str(Estimate(1.234, 1.0, 2.0)) == "1.23 [1.00, 2.00]"


def test_summary_of_replayed_arms_and_of_what_lies_beyond() -> None:
    rows = rows_of(3)
    for row in rows:
        row["replayed"]["fixed@1.2"] = {"tokens": 40, "rounds": [(row["context"], 5, 2)]}
        row["replayed"]["frozen"] = {"tokens": 40, "rounds": [(row["context"], 5, 1)]}
    rows.append(row_of("s9", 0, 200_000, {}, {"ar": 1.0, "sharpdraft": 1.0}))
    cells = {(c.bucket, c.arm): c for c in summarise(rows)}
    assert {bucket for bucket, _ in cells} == {0, 1, 9}
    assert cells[9, "sharpdraft"].mal is None, "nothing was drafted there"
    fixed = cells[0, "fixed@1.2"]
    assert (fixed.speed, fixed.speedup) == (None, None)
    assert fixed.mal == Estimate(3.0, 3.0, 3.0) and fixed.gain == Estimate(1.0, 1.0, 1.0)
    assert [arm for bucket, arm in cells if bucket == 0] == [
        "ar",
        "frozen",
        "sharpdraft",
        "fixed@1.2",
    ]
    assert summarise([]) == []


def text_of(cells: list[Cell], width: int | None = None) -> str:
    drawn, left_out = table(cells, width)
    console = Console(width=width or width_of(drawn), color_system=None)
    with console.capture() as capture:
        console.print(drawn)
    return capture.get() + left_out


def test_table() -> None:
    text = text_of(summarise(rows_of(4)))
    for part in (
        "0-512",
        "512-1K",
        "frozen",
        "2.00 [2.00, 2.00]",
        "MAL - Frozen's",
        "top-32 mass",
    ):
        assert part in text
    assert text.count("0-512") == 1
    only_ar = [cell for cell in summarise(rows_of(2)) if cell.arm == "ar"]
    assert "MAL" not in text_of(only_ar) and "tokens/s" in text_of(only_ar)


def test_a_table_of_several_workloads_and_of_new_rounds() -> None:
    plain = text_of(summarise(rows_of(4)))
    assert "workload" not in plain and "MAL, new" not in plain
    rows = rows_of(4)
    for number, row in enumerate(rows):
        row["workload"] = ("code", "far")[number // 4]
        for arm in (*row["arms"].values(), *row["replayed"].values()):
            arm["new"] = "1" * len(arm["rounds"])
    lines = text_of(summarise(rows)).splitlines()
    assert lines[0].split()[:2] == ["workload", "context"] and "MAL, new" in lines[0]
    assert [sum(line.split()[:1] == [name] for line in lines) for name in ("code", "far")] == [1, 1]
    assert sum("0-512" in line for line in lines) == 2
    one = [row for row in rows if row["workload"] == "far"]
    text = text_of(summarise(one))
    assert "workload" not in text and "MAL, new" in text


def test_figure_has_a_row_of_panels_for_each_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    rows, seen = rows_of(4), []
    for number, row in enumerate(rows):
        row["workload"] = ("code", "far")[number // 4]

    def look(drawn: Any, *args: Any, **options: Any) -> None:
        seen.extend(axis.get_title() for axis in drawn.axes)

    monkeypatch.setattr(figures.Figure, "savefig", look)
    figure(summarise(rows), tmp_path / "f.png", "two")
    assert seen == [
        f"{workload}: {what}"
        for workload in ("code", "far")
        for what in ("tokens per second", "mean accepted length", "top-32 attention mass")
    ]


def test_figure_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, count in enumerate((1, 4)):
        path = tmp_path / "new" / f"{number}.png"
        figure(summarise(rows_of(count)), path, "a title")
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    rows = rows_of(1)
    for row in rows:
        row["arms"]["sharpdraft"]["rounds"] = []  # Nothing drafted: no MAL to draw.
    figure(summarise(rows), tmp_path / "none.png", "nothing of $x_{ was drafted")
    assert (tmp_path / "none.png").stat().st_size > 10_000
    with pytest.raises(SharpDraftError, match="no figure: nothing was measured"):
        figure([], tmp_path / "empty.png", "nothing")


def test_figure_shows_every_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    labels: list[list[str]] = []

    def look(drawn: Any, *args: Any, **options: Any) -> None:
        labels.extend([tick.get_text() for tick in axis.get_xticklabels()] for axis in drawn.axes)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", look)
    rows = [
        row_of("s", number, 512 << number, {"sharpdraft": [1]}, {"ar": 2.0, "sharpdraft": 1.0})
        for number in range(11)
    ]
    figure(summarise(rows), tmp_path / "figure.png", "long")
    assert labels == [[label(number) for number in range(11)]] * 3
    assert labels[0][-2:] == ["128K-256K", "256K-512K"]


DRAFTERS = ("dflash", "eagle3", "pard")
WIDE = ["ar", *(f"{d}:{a}" for d in DRAFTERS for a in ("frozen", "sharpdraft", "sharpdraft@1024"))]


def wide_cells(arms: Sequence[str] = WIDE, intervals: bool = True) -> list[Cell]:
    def estimate(value: float) -> Estimate:
        return Estimate(value, 0.9 * value, 1.1 * value) if intervals else Estimate(value)

    found = []
    for bucket in (0, 4, 6):
        for arm in arms:
            few = None if arm == "ar" else estimate(2.345)
            cell = Cell(arm, bucket, 9, 999, estimate(1234.5), few, few, few, few)
            found.append(cell)
    return found


def check_lines(text: str, cells: Sequence[Cell]) -> None:
    """One line for each cell, with its arm and speed."""
    lines = [line for line in text.splitlines() if "1234.50" in line]
    assert len(lines) == len(cells)
    for line, cell in zip(lines, cells, strict=True):
        assert f" {cell.arm} " in line
        assert line.startswith((f" {label(cell.bucket)} ", "   "))


def test_a_table_in_a_pipe_is_as_wide_as_it_needs_to_be() -> None:
    cells = wide_cells()
    text = text_of(cells)
    check_lines(text, cells)
    assert text.count("2.35 [2.11, 2.58]") + text.count("2.34 [2.11, 2.58]") == 4 * 27
    assert text.count("1234.50 [1111.05, 1357.95]") == len(cells)
    assert "no room" not in text and "\u00b1" not in text


@pytest.mark.parametrize(
    ("width", "arms", "shown", "gone"),
    [
        (160, WIDE, ("[1111.05", "top-32 mass"), ("no room", "\u00b1")),
        (110, WIDE, ("\u00b10.23", "top-32"), ("[1111.05", "no room")),
        (80, WIDE, ("2.35", "top-32", "no room here for intervals;"), ("\u00b1",)),
        (60, WIDE, ("MAL", "intervals, MAL - Frozen's, top-32 mass;"), ("\u00b1",)),
        (80, ["ar", "frozen", "sharpdraft"], ("2.35", "no room"), ("[1111.05",)),
        (40, WIDE, ("no room here for intervals, x AR, MAL",), ("\u00b1",)),
    ],
)
def test_a_narrow_table_leaves_out_before_it_wraps(
    width: int, arms: Sequence[str], shown: Sequence[str], gone: Sequence[str]
) -> None:
    cells = wide_cells(arms)
    text = text_of(cells, width)
    if width >= 50:
        check_lines(text, cells)
    assert all(len(line) <= width for line in text.splitlines() if "--json" not in line)
    for part in shown:
        assert part in text
    for part in gone:
        assert part not in text


def test_a_table_without_intervals_misses_none() -> None:
    cells = wide_cells(intervals=False)
    text = text_of(cells, 80)
    check_lines(text, cells)
    assert "interval" not in text and "no room" not in text
