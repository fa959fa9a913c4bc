"""What a run found, printed: a table, whether arms wrote the same, where the figure is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import SharpDraftError
from .console import err, out

if TYPE_CHECKING:
    from ..lab.plan import Plan


@dataclass(frozen=True)
class Run:
    """Rows of a run, its plan, and where and under which title it is shown."""

    rows: Sequence[dict[str, Any]]
    plan: Plan
    out_dir: Path
    title: str


def report(run: Run, as_json: bool) -> None:
    """Print a run and draw its figure. Raises SharpDraftError for one without rows."""
    from ..lab.statistics import summarise
    from ..lab.table import table

    if not run.rows:
        raise SharpDraftError(
            "nothing was measured: no answer of the sessions fits into the context"
        )
    cells = summarise(run.rows, run.plan.edges, run.plan.timed + run.plan.replayed)
    differences = _differences(run.rows)
    picture = _picture(cells, run)
    if as_json:
        figures = {
            "cells": [asdict(cell) for cell in cells],
            "differences": differences,
            "figure": None if picture is None else str(picture),
        }
        typer.echo(json.dumps(figures))
        return
    out.print(table(cells, run.plan.edges, run.title))
    first = next(iter(run.rows[0]["arms"]))
    if not differences and not run.plan.sampling.temperature:
        agreed = sum(
            arm["tokens"] for row in run.rows for name, arm in row["arms"].items() if name != first
        )
        out.print(
            f"All {agreed} tokens of the other arms are those that {first} wrote.", highlight=False
        )
    for each in differences:
        gap = (
            f", where the target's two logits are {each['gap']:.1e} apart" if "gap" in each else ""
        )
        out.print(
            f"{each['session']}, turn {each['turn']}: {each['arm']} differs from {first} at "
            f"{each['at']} of the answer{gap}",
            highlight=False,
        )
    if picture is not None:
        out.print(f"figure: {picture}", highlight=False)


def _differences(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"session": row["session"], "turn": row["turn"], "arm": name, **what}
        for row in rows
        for name, what in row["differences"].items()
    ]


def _picture(cells: Sequence[Any], run: Run) -> Path | None:
    """Where the figure is; None, and a note, where it cannot be drawn."""
    from ..lab.figure import figure

    path = run.out_dir / "figure.png"
    try:
        figure(cells, run.plan.edges, path, run.title)
    except SharpDraftError as error:
        err.print(f"note: {error}", highlight=False)
        return None
    return path
