"""Figures by context length as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from .statistics import Cell, Estimate

_COLUMNS: dict[str, Callable[[Cell], Estimate | None]] = {
    "tokens/s": lambda cell: cell.speed,
    "x AR": lambda cell: cell.speedup,
    "MAL": lambda cell: cell.mal,
    "MAL - Frozen's": lambda cell: cell.gain,
    "top-32 mass": lambda cell: cell.mass,
}


def label(bucket: int, edges: Sequence[int]) -> str:
    """A bucket as people write it, such as 1K-2K."""

    def short(n: int) -> str:
        return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n)

    return f"{short(edges[bucket - 1]) if bucket else 0}-{short(edges[bucket])}"


def table(cells: Sequence[Cell], edges: Sequence[int], title: str) -> Table:
    """The cells as a terminal table; columns nobody measured are left out."""
    columns = {
        heading: get
        for heading, get in _COLUMNS.items()
        if any(get(cell) is not None for cell in cells)
    }
    shown = Table(title=title, title_justify="left")
    shown.add_column("context")
    shown.add_column("arm", overflow="fold")
    for heading in columns:
        shown.add_column(heading, justify="right")
    last = None
    for cell in cells:
        if last is not None and cell.bucket != last:
            shown.add_section()
        name = label(cell.bucket, edges) if cell.bucket != last else ""
        last = cell.bucket
        found = (get(cell) for get in columns.values())
        shown.add_row(name, cell.arm, *("" if e is None else str(e) for e in found))
    return shown
