"""Workloads as data: multi-turn sessions, built in or from a prompt file, and their recorded
texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import SharpDraftError, note
from ..hub.smollm2 import SMOLLM2, recording
from .prompts import conversation_of, read_rows


@dataclass(frozen=True)
class Task:
    """A session: the user's turns, how long an answer may get, and the system message.

    lead: characters at the start of the first turn that are a text to be read, with the question
    behind it; reading them is no part of a measured turn.
    """

    name: str
    turns: tuple[str, ...]
    answer_tokens: int = 192
    # Left out of repr, so that the digests of runs from before them are still theirs.
    system: str | None = field(default=None, repr=False)
    lead: int = field(default=0, repr=False)


@dataclass(frozen=True)
class Turn:
    """A recorded turn as token spans: the prompt is [start, answer), the answer [answer, end). What
    stands before the start is read beforehand: earlier turns, and the lead of a first one."""

    start: int
    answer: int
    end: int


@dataclass(frozen=True)
class Recording:
    """A session as its target wrote it once."""

    name: str
    tokens: tuple[int, ...]
    turns: tuple[Turn, ...]


def built_in() -> list[Task]:
    """The long multi-turn sessions held out from training."""
    text = resources.files(__package__).joinpath("sessions.json").read_text(encoding="utf-8")
    return [Task(s["name"], tuple(s["turns"])) for s in json.loads(text)["sessions"]]


def from_file(path: Path, answer_tokens: int) -> list[Task]:
    """The tasks of a prompt file, of any format and shape that docs/benchmark.md names. Notes what
    its rows have that is not asked. Raises SharpDraftError for a file that holds no prompt or
    cannot be read."""
    tasks: dict[str, Task] = {}
    left_out: set[str] = set()
    for where, row in read_rows(path):
        try:
            found = conversation_of(row)
        except ValueError as error:
            raise SharpDraftError(f"{path}, {where}: {error}") from error
        own = row.get("name") if isinstance(row, dict) else None
        name = where.replace(" ", "-") if own is None else str(own)
        if name in tasks:
            raise SharpDraftError(f"{path}: every name must be given once, and {name} is twice")
        tasks[name] = Task(name, found.turns, answer_tokens, found.system)
        left_out |= found.left_out
    if not tasks:
        raise SharpDraftError(
            f"{path} holds no prompt: write one a line, or JSON lines with prompt or turns"
        )
    if left_out:
        note(f"{path}: what is asked are the users' texts; not used: {', '.join(sorted(left_out))}")
    return list(tasks.values())


def digest(sessions: Sequence[Task] | Sequence[Recording]) -> str:
    """Tells one set of sessions from another."""
    text, tasks = repr(list(sessions)), [each for each in sessions if isinstance(each, Task)]
    if any(task.system is not None for task in tasks):
        text += repr([task.system for task in tasks])
    if any(task.lead for task in tasks):
        text += repr([task.lead for task in tasks])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recordings(workload: str = "greedy") -> list[Recording]:
    """The sessions of a workload as SmolLM2-135M-Instruct wrote them; none where they were not
    recorded. Raises SharpDraftError without the package that has them, and for a recording of
    another target or workload."""
    path = recording(workload)
    return read_recording(path, workload) if path.exists() else []


def read_recording(path: Path, workload: str) -> list[Recording]:
    """A recording of SMOLLM2, built-in sessions first. Raises SharpDraftError for one of another
    target or workload."""
    mine = {"target": SMOLLM2, "workload": workload}
    with safe_open(str(path), "pt") as file:
        # The first recordings do not say whose they are.
        told = {**mine, **(file.metadata() or {})}
        if any(told[key] != value for key, value in mine.items()):
            raise SharpDraftError(
                f"{path} holds {told['workload']} as {told['target']} wrote it, not {workload} of "
                f"{SMOLLM2}: record it anew"
            )
        keys = list(file.keys())
        names = {key.removesuffix(".tokens") for key in keys if key.endswith(".tokens")}
        ours = [task.name for task in built_in() if task.name in names]
        return [
            Recording(
                name,
                tuple(file.get_tensor(f"{name}.tokens").int().tolist()),
                tuple(Turn(*span) for span in file.get_tensor(f"{name}.turns").tolist()),
            )
            for name in [*ours, *sorted(names.difference(ours))]
        ]


def turns_of(written: Tensor) -> list[Turn]:
    """Turns of a session written by `train.sessions.write_wave`, from its mask of the target's own
    tokens.

    A last answer that the end of the session cut off counts too.
    """
    edges = torch.diff(
        written.int(),
        prepend=torch.zeros(1, dtype=torch.int32),
        append=torch.zeros(1, dtype=torch.int32),
    )
    starts, ends = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    return [Turn(0 if i == 0 else ends[i - 1], starts[i], ends[i]) for i in range(len(starts))]
