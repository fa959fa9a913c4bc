"""Bars, and what is said where a long command is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..errors import SharpDraftError
from .console import err


@contextmanager
def bar(total: int, text: str) -> Iterator[tuple[Progress, TaskID]]:
    """A bar of `total` steps on stderr, gone when it is done."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Where nobody watches, even a transient bar would leave an empty line.
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield progress, progress.add_task(text, total=total)


@contextmanager
def resumable(what: str) -> Iterator[None]:
    """Ctrl-C inside is an error that says so: `what` is kept."""
    try:
        yield
    except KeyboardInterrupt:
        raise SharpDraftError(
            f"stopped; {what} is kept, and the same command goes on from there"
        ) from None
