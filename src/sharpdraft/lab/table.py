"""Figures by context length as a table for the terminal: one line a row, however wide."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .buckets import label
from .statistics import Cell, Estimate

_COLUMNS: dict[str, Callable[[Cell], Estimate | None]] = {
    "tokens/s": lambda cell: cell.speed,
    "x AR": lambda cell: cell.speedup,
    "MAL": lambda cell: cell.mal,
    "MAL - Frozen's": lambda cell: cell.gain,
    "MAL, new": lambda cell: cell.mal_new,
    "top-32 mass": lambda cell: cell.mass,
}
_ANY_WIDTH = 100_000


def table(cells: Sequence[Cell], width: int | None = None) -> tuple[Table, str]:
    """The cells as a table, and what it leaves out; columns that nobody measured are no part of it.

    width: of the terminal, in characters. What does not fit is shortened before it is left out:
    intervals become half their width, then go, then columns from the right. None: everything, at
    whatever width that takes.
    """
    found = {name: [e for e in map(get, cells) if e] for name, get in _COLUMNS.items()}
    columns = [name for name, estimates in found.items() if estimates]
    intervals = any(e.low is not None for estimates in found.values() for e in estimates)
    forms: list[tuple[list[str], Callable[[Estimate], str], str]] = [(columns, str, "")]
    if intervals:
        half = "\u00b1 is half of a 95 % interval; --json or a pipe has its ends"
        forms.append((columns, _half, half))
    for kept in range(len(columns), 0, -1):
        gone = ["intervals"] * intervals + columns[kept:]
        said = f"no room here for {', '.join(gone)}; --json or a pipe has all" if gone else ""
        forms.append((columns[:kept], _value, said))
    for shown, write, left_out in forms:
        drawn = _drawn(cells, shown, write)
        if width is None or width_of(drawn) <= width:
            return drawn, left_out
    return drawn, left_out


def width_of(drawn: Table) -> int:
    """Characters that a table takes if nothing of it is cut or wrapped."""
    return Console(width=_ANY_WIDTH).measure(drawn).maximum


def _drawn(
    cells: Sequence[Cell], columns: Sequence[str], write: Callable[[Estimate], str]
) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False)
    several = len({cell.workload for cell in cells}) > 1
    if several:
        drawn.add_column("workload", no_wrap=True)
    drawn.add_column("context", no_wrap=True)
    drawn.add_column("arm", overflow="fold")
    for heading in columns:
        # A heading may take two lines, which makes narrow columns of it.
        narrow = re.sub(r"(-|32|,) ", r"\1\n", heading) if write is not str else heading
        drawn.add_column(narrow, justify="right", no_wrap=True)
    last: tuple[str, int] | None = None
    for cell in cells:
        begins = (cell.workload, cell.bucket) != last
        if last is not None and begins:
            drawn.add_section()
        whose = cell.workload if last is None or cell.workload != last[0] else ""
        name = label(cell.bucket) if begins else ""
        last = cell.workload, cell.bucket
        found = (_COLUMNS[heading](cell) for heading in columns)
        # Neither a name nor an interval in brackets is a style.
        first = (whose, name) if several else (name,)
        texts = (*first, cell.arm, *("" if e is None else write(e) for e in found))
        drawn.add_row(*map(Text, texts))
    return drawn


def _half(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return _value(estimate)
    return f"{estimate.value:.2f} \u00b1{(estimate.high - estimate.low) / 2:.2f}"


def _value(estimate: Estimate) -> str:
    return f"{estimate.value:.2f}"
