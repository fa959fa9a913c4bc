"""All workloads by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from ..errors import SharpDraftError, note
from .code_edits import CODE
from .documents import DOCUMENTS
from .far_keys import FAR
from .tasks import Task, built_in
from .word_problems import MATH
from .workload import Reader, Workload

_Made = TypeVar("_Made")


def _built_in(reader: Reader) -> Sequence[Task]:
    if not reader.held_out:
        raise SharpDraftError("the built-in sessions are all held out: training has its own")
    return built_in()[: reader.sessions]


_OF_BUILT_IN = ("templates and turns of this package, workloads/sessions.json", "Apache-2.0")
GREEDY = Workload(
    "greedy", "diaries, stories, advice: greedy text that repeats itself", *_OF_BUILT_IN, _built_in
)
SAMPLED = Workload(
    "sampled",
    "the same sessions at temperature 1, where the text does not loop",
    *_OF_BUILT_IN,
    _built_in,
    temperature=1.0,
)

WORKLOADS = {each.name: each for each in (GREEDY, SAMPLED, DOCUMENTS, CODE, MATH, FAR)}


def workloads_of(names: Sequence[str]) -> list[Workload]:
    """The workloads called `names`. Raises SharpDraftError for a name that is none's, or is given
    twice."""
    for number, name in enumerate(names):
        if name not in WORKLOADS:
            raise SharpDraftError(f"workload '{name}': known are {', '.join(WORKLOADS)}")
        if name in names[:number]:
            raise SharpDraftError(f"workload '{name}' is named twice")
    if not names:
        raise SharpDraftError(f"no workload is named: known are {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in names]


def tasks_of(workload: Workload, reader: Reader) -> list[Task]:
    """A workload's sessions, their names beginning with its own. Raises SharpDraftError where there
    are none for this reader, or their source is not installed."""
    found = [replace(task, name=f"{workload.name}/{task.name}") for task in workload.tasks(reader)]
    if not found:
        raise SharpDraftError(
            f"{workload.name}: none of its texts fits into a context of {reader.limit:,} tokens"
        )
    return found


def available(workloads: Sequence[Workload], made: Callable[[Workload], _Made]) -> list[_Made]:
    """What is made of several workloads. One of which nothing can be made is noted and left out;
    raises SharpDraftError where none is left."""
    found: list[_Made] = []
    missing: list[str] = []
    for workload in workloads:
        try:
            found.append(made(workload))
        except SharpDraftError as error:
            missing.append(str(error))
    if not found:
        raise SharpDraftError("; ".join(missing))
    for said in missing:
        note(f"{said}; the other workloads are measured")
    return found
