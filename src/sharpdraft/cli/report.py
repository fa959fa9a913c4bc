"""What a run found, printed: a table, whether arms wrote the same, what was not measured, and
where the figure is."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ..errors import SharpDraftError, note
from .console import out

if TYPE_CHECKING:
    from ..lab.novelty import Repetition
    from ..lab.plan import Plan, Row
    from ..lab.statistics import Cell

_NAMED = 5
"""As many of the skipped turns are named one by one."""
_INCOMPLETE = 3
"""Exit code of a run that skipped something."""


@dataclass(frozen=True)
class Run:
    """Rows of a run, its plan, and where and under which title it is shown."""

    rows: Sequence[Row]
    plan: Plan
    out_dir: Path
    title: str


def report(run: Run, as_json: bool) -> None:
    """Print a run and draw its figure; what was skipped, or had no drafts, is a note. Raises
    SharpDraftError for a run that measured nothing, and typer.Exit with exit code 3 for one that
    skipped something."""
    from ..lab.buckets import label
    from ..lab.plan import measured
    from ..lab.statistics import repetition, summarise, undrafted
    from ..workloads.chat import describe

    rows, skipped = measured(run.rows), [row for row in run.rows if "skipped" in row]
    kinds = _kinds(skipped)
    if not rows:
        why = "; ".join(kinds) or "no answer of the sessions fits into the context"
        raise SharpDraftError(f"nothing was measured: {why}")
    arms = run.plan.timed + run.plan.replayed
    cells, without_drafts = summarise(rows, arms), undrafted(rows, arms)
    for kind in kinds:
        note(f"skipped {kind}")
    for each in without_drafts:
        note(
            f"{each.arm} drafted nothing behind {each.context:,} tokens: {each.rounds:,} rounds "
            f"without drafts, in {each.turns} of {each.measured} answers, which are no part of MAL"
        )
    differences = _differences(rows)
    picture = _picture(cells, run)
    told = run.plan.template
    repeated = repetition(rows)
    if as_json:
        figures = {
            "template": dict(told),
            "cells": [{"context": label(cell.bucket), **asdict(cell)} for cell in cells],
            "repetition": [
                {"workload": workload, **asdict(found)} | found.figures
                for workload, found in repeated.items()
            ],
            "differences": differences,
            "undrafted": [asdict(each) for each in without_drafts],
            "skipped": [_flat(row) for row in skipped],
            "figure": None if picture is None else str(picture),
        }
        typer.echo(json.dumps(figures, allow_nan=False))
    else:
        _show(cells, run.title)
        for workload, found in repeated.items():
            _say(_repetition(workload, found))
        if told:
            _say(f"chat template: {describe(told)}")
        _say(_closing(run, rows, differences, len(skipped)))
        for difference in differences:
            _say(_difference(difference, next(iter(rows[0]["arms"]))))
        if picture is not None:
            _say(f"figure: {picture}")
    if skipped:
        raise typer.Exit(_INCOMPLETE)


def _show(cells: Sequence[Cell], title: str) -> None:
    """The table, which is as wide as it needs to be where no terminal limits it."""
    from ..lab.table import table, width_of

    shown, left_out = table(cells, out.width if out.is_terminal else None)
    _say(title)
    if out.is_terminal:
        out.print(shown)
    else:
        Console(width=width_of(shown)).print(shown)
    if left_out:
        _say(left_out)


def _say(text: str) -> None:
    """A line of its own, which only a terminal may wrap."""
    out.print(text, soft_wrap=True, highlight=False, markup=False)


def _repetition(workload: str, found: Repetition) -> str:
    """How much the answers repeat, which every accepted length is to be read beside."""
    whose = f"Text of {workload}" if workload else "Text"
    if found.share is None or found.mal is None:
        return f"{whose}: too short to say how much it repeats itself."
    return (
        f"{whose}: at {found.share:.0%} of {found.positions:,} positions the last four tokens were "
        f"seen before. Lookup without a model: MAL {found.mal:.2f}, and "
        f"{found.mal_everywhere:.2f} with every position as an anchor."
    )


def _kinds(skipped: Sequence[Row]) -> list[str]:
    """One line for each kind of turns that were skipped. Of errors that differ in numbers alone the
    first is told."""
    from ..lab.plan import FAILED

    kinds: dict[str, list[str]] = {}
    told: set[str] = set()
    for row in skipped:
        kind, reason = row["skipped"]["kind"], row["skipped"]["reason"]
        name = f"{row['session']}, turn {row['turn']}" if row["turn"] else row["session"]
        shape = re.sub(r"\d+", "", reason)
        repeated = kind == FAILED and shape in told
        told.add(shape)
        named = f"{name} ({reason})" if reason and not repeated else name
        kinds.setdefault(kind, []).append(named)
    lines = []
    for kind, names in kinds.items():
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        lines.append(f"{_turns(len(names))}, {kind}: {'; '.join(names[:_NAMED])}{more}")
    return lines


def _closing(
    run: Run, rows: Sequence[Row], differences: Sequence[dict[str, Any]], skipped: int
) -> str:
    """Whether the arms of the table wrote the same, and how much that is."""
    first, *others = rows[0]["arms"]
    total = _turns(sum(row.get("requests", 1) for row in rows))
    if run.plan.sampling.temperature:
        said = f"Answers are sampled, every arm's its own, in {total}: they are not compared"
    elif not others:
        tokens = sum(row["arms"][first]["tokens"] for row in rows)
        said = f"{first} alone was timed, {tokens:,} tokens in {total}: no arm to compare it with"
        if replayed := len(rows[0]["replayed"]):
            said += f"; what was replayed ({replayed}) follows this text"
    elif differences:
        said = f"{len(differences)} answers of the other arms are not {first}'s, in {total}"
    else:
        agreed = sum(row["arms"][name]["tokens"] for row in rows for name in others)
        said = f"All {agreed} tokens of the other arms are those that {first} wrote, in {total}"
    return f"{said}; {_turns(skipped)} skipped." if skipped else f"{said}."


def _flat(row: Row) -> dict[str, Any]:
    return {key: row[key] for key in ("session", "turn", "context")} | row["skipped"]


def _turns(count: int) -> str:
    return f"{count:,} turn{'s' * (count != 1)}"


def _difference(each: dict[str, Any], first: str) -> str:
    gap = f", where the target's two logits are {each['gap']:.1e} apart" if "gap" in each else ""
    return (
        f"{each['session']}, turn {each['turn']}: {each['arm']} differs from {first} at "
        f"{each['at']} of the answer{gap}"
    )


def _differences(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {"session": row["session"], "turn": row["turn"], "arm": name, **what}
        for row in rows
        for name, what in row["differences"].items()
    ]


def _picture(cells: Sequence[Cell], run: Run) -> Path | None:
    """Where the figure is; None, and a note, where it cannot be drawn."""
    from ..lab.figure import figure

    path = run.out_dir / "figure.png"
    try:
        figure(cells, path, run.title)
    except SharpDraftError as error:
        note(str(error))
        return None
    return path
