"""Workloads as data: multi-turn sessions, built in or from a prompt file, and their recorded
texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..errors import SharpDraftError
from ..hub.smollm2 import recording


@dataclass(frozen=True)
class Task:
    """A session: the user's turns, and how long an answer may get."""

    name: str
    turns: tuple[str, ...]
    answer_tokens: int = 192


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
    """Tasks from JSON lines with "turns" (a list) or "prompt" (a string) and optionally "name", or
    from a text file with one prompt a line. Raises SharpDraftError for a file that holds no prompt
    or cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SharpDraftError(f"cannot read the prompt file {path}: {error}") from error
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row: object = line
        if line.lstrip().startswith("{"):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SharpDraftError(f"{path}, line {number}: not JSON ({error})") from error
        turns: Any = [line]
        name = f"line-{number}"
        if isinstance(row, dict):
            turns = row["turns"] if "turns" in row else [row.get("prompt")]
            name = str(row.get("name", name))
        if (
            not isinstance(turns, list)
            or not turns
            or not all(isinstance(t, str) and t.strip() for t in turns)
        ):
            raise SharpDraftError(
                f'{path}, line {number}: needs "prompt" (text) or "turns" (a list of texts)'
            )
        tasks.append(Task(name, tuple(turns), answer_tokens))
    if not tasks:
        raise SharpDraftError(
            f"{path} holds no prompt: write one a line, or JSON lines with prompt or turns"
        )
    if len({task.name for task in tasks}) != len(tasks):
        raise SharpDraftError(f"{path}: every name must be given once")
    return tasks


def digest(tasks: Sequence[Task]) -> str:
    """Tells one set of tasks from another."""
    return hashlib.sha256(repr(tasks).encode()).hexdigest()[:16]


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


def bucket_of(context: int, edges: Sequence[int]) -> int | None:
    """Index of the bucket (0, e0], (e0, e1], … that a context length falls into; None beyond the
    last."""
    return next((i for i, edge in enumerate(edges) if context <= edge), None)
