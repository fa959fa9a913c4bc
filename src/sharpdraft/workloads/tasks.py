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
from safetensors.torch import load_file
from torch import Tensor

from ..errors import SharpDraftError, note
from ..hub.smollm2 import recording
from .prompts import conversation_of, read_rows


@dataclass(frozen=True)
class Task:
    """A session: the user's turns, how long an answer may get, and the system message."""

    name: str
    turns: tuple[str, ...]
    answer_tokens: int = 192
    # Left out of repr, so that the digests of runs from before them are still theirs.
    system: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Turn:
    """A recorded turn as token spans: the prompt is [start, answer), the answer [answer, end)."""

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


def digest(tasks: Sequence[Task]) -> str:
    """Tells one set of tasks from another."""
    text = repr(list(tasks))
    if any(task.system is not None for task in tasks):
        text += repr([task.system for task in tasks])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recordings() -> list[Recording]:
    """The built-in sessions as SmolLM2-135M-Instruct wrote them. Raises SharpDraftError without the
    package that has them."""
    tensors = load_file(recording())
    found = []
    for task in built_in():
        if f"{task.name}.tokens" in tensors:
            tokens = tuple(tensors[f"{task.name}.tokens"].int().tolist())
            turns = tuple(Turn(*span) for span in tensors[f"{task.name}.turns"].tolist())
            found.append(Recording(task.name, tokens, turns))
    return found


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
