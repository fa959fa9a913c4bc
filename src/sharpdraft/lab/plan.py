"""What is run, and its rows on disk: a run that was broken off goes on where it stood."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..decode.sampling import GREEDY, Sampling
from ..decode.session import Arm
from ..errors import SharpDraftError
from ..workloads.tasks import Recording
from .machine import machine

EDGES = (512, 1024, 2048, 4096, 8192)
"""Upper ends of the context buckets, in tokens."""
_SHORTEST = 32
"""Answers of fewer tokens are not measured in recorded sessions."""


@dataclass(frozen=True)
class Plan:
    """What is run. Two runs of one plan write the same rows.

    tasks: what tells one prompt file from another, a digest. sampling: how every arm chooses
    tokens; each answer is drawn with a seed of its own, made from this one.
    """

    target: str
    drafter: str
    timed: tuple[Arm, ...]
    replayed: tuple[Arm, ...] = ()
    turns_per_bucket: int = 1
    edges: tuple[int, ...] = EDGES
    masses_every: int = 0
    tasks: str = ""
    sampling: Sampling = GREEDY

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All arms, each once."""
        return tuple(dict.fromkeys((*self.timed, *self.replayed)))

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the header of a run's rows."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["sampling"] = asdict(self.sampling)
        for part in ("timed", "replayed"):
            values[part] = [_written(arm) for arm in values[part]]
        return dict(json.loads(json.dumps(values, default=str)))


def _written(arm: Arm) -> dict[str, Any]:
    return {"name": arm.name, "drafter": arm.drafter, "settings": arm.settings.to_dict()}


class RunLog:
    """Rows of a run as JSON lines behind a header with its plan; each is on disk before the next is
    measured."""

    def __init__(self, path: Path, plan: Plan) -> None:
        """Raises SharpDraftError where the file cannot be written, or holds another plan's run."""
        self.path = path
        self.rows: list[dict[str, Any]] = []
        try:
            self._open(plan)
        except (OSError, UnicodeDecodeError) as error:
            raise SharpDraftError(
                f"cannot read and write {path} ({error}): give another --out"
            ) from error

    def _open(self, plan: Plan) -> None:
        path = self.path
        header = {"plan": plan.to_dict(), "machine": machine()}
        kept: list[str] = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    # Cut short by a crash or a full disk: what follows is not trusted either.
                    break
                kept.append(line)
                self.rows.append(row)
            if self.rows and self.rows[0].get("plan") != header["plan"]:
                raise SharpDraftError(
                    f"{path} holds a run with other settings: give another --out, or move it away"
                )
            self.rows = self.rows[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("\n".join(kept or [json.dumps(header)]) + "\n", encoding="utf-8")
        os.replace(partial, path)

    def add(self, row: dict[str, Any]) -> None:
        """Write a row. Raises SharpDraftError for a full disk; the rows before it stay."""
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise SharpDraftError(
                f"cannot write {self.path} ({error}): make room and run the same command again; it "
                "goes on from here"
            ) from error
        self.rows.append(row)


def row_of(rows: Sequence[dict[str, Any]], session: str, turn: int) -> dict[str, Any] | None:
    """The row of a turn, if it was measured."""
    found = (row for row in rows if row["session"] == session and row["turn"] == turn)
    return next(found, None)


def measured_turns(recording: Recording, plan: Plan, limit: int) -> list[int]:
    """Numbers of the turns to measure, `limit` tokens being the longest context: spread evenly over
    each bucket, the last one at its upper end."""
    chosen: list[int] = []
    low = 0
    for edge in plan.edges:
        inside = [
            i
            for i, turn in enumerate(recording.turns)
            if low < turn.answer
            and turn.end <= min(edge, limit)
            and turn.end - turn.answer >= _SHORTEST
        ]
        count = min(plan.turns_per_bucket, len(inside))
        chosen += [inside[len(inside) - 1 - (k * len(inside)) // count] for k in range(count)][::-1]
        low = edge
    return chosen
