"""What is run, and its rows on disk: a run that was broken off goes on where it stood."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..decode.sampling import GREEDY, Sampling
from ..decode.session import Arm
from ..errors import SharpDraftError, one_line
from ..workloads.tasks import Recording
from .buckets import bounds, bucket_of
from .machine import machine

Row = dict[str, Any]
"""A turn that was measured, or one that was not, which says why in "skipped"."""
FAILED = "failed"
"""The kind of turns that were skipped over an error."""
_SHORTEST = 32
"""Answers of fewer tokens are not measured in recorded sessions."""


@dataclass(frozen=True)
class Plan:
    """What is run. Two runs of one plan write the same rows.

    tasks: what tells one prompt file from another, a digest. sampling: how every arm chooses
    tokens; each answer is drawn with a seed of its own, made from this one. template: what the chat
    template was told, where that is not the template as it is (ChatSettings.to_dict). workloads:
    those that were named.
    """

    target: str
    drafter: str
    timed: tuple[Arm, ...]
    replayed: tuple[Arm, ...] = ()
    turns_per_bucket: int = 1
    masses_every: int = 0
    tasks: str = ""
    sampling: Sampling = GREEDY
    template: Mapping[str, Any] = field(default_factory=dict)
    workloads: tuple[str, ...] = ()

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All arms, each once."""
        return tuple(dict.fromkeys((*self.timed, *self.replayed)))

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the header of a run's rows."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["sampling"] = asdict(self.sampling)
        # Not in the headers of runs from before them.
        for part in ("template", "workloads"):
            if not values[part]:
                del values[part]
        for part in ("timed", "replayed"):
            values[part] = [_written(arm) for arm in values[part]]
        return dict(json.loads(json.dumps(values, default=str)))


def _written(arm: Arm) -> dict[str, Any]:
    return {"name": arm.name, "drafter": arm.drafter, "settings": arm.settings.to_dict()}


class RunLog:
    """Rows of a run as JSON lines behind a header with its plan; each is on disk before the next is
    measured. Turns that were skipped are tried again when the run goes on. While it lives, no other
    one writes there."""

    def __init__(self, path: Path, plan: Plan) -> None:
        """Raises SharpDraftError where the file cannot be written, holds another plan's run, or
        another run writes to it now."""
        self.path = path
        self.rows: list[Row] = []
        # Of this process: what goes on in it takes turns.
        self.lock = FileLock(path.with_suffix(".lock"), timeout=0, is_singleton=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.lock.acquire()
            self._open(plan)
        except Timeout as error:
            raise SharpDraftError(
                f"another run writes to {path} now: wait for it, or give another --out"
            ) from error
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
                if not isinstance(row, dict):
                    break
                if kept and "skipped" in row:
                    continue
                kept.append(line)
                self.rows.append(row)
            if self.rows and _today(self.rows[0].get("plan")) != header["plan"]:
                raise SharpDraftError(
                    f"{path} holds a run with other settings: give another --out, or move it away"
                )
            self.rows = self.rows[1:]
        partial = path.with_suffix(".partial")
        partial.write_text("\n".join(kept or [json.dumps(header)]) + "\n", encoding="utf-8")
        os.replace(partial, path)

    def add(self, row: Row) -> None:
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


def _today(plan: Any) -> Any:
    """The plan of a header. Earlier ones name the edges of their buckets, which now follow the
    contexts."""
    return {k: v for k, v in plan.items() if k != "edges"} if isinstance(plan, dict) else plan


def skipped_row(session: str, turn: int, context: int, kind: str, reason: str = "") -> Row:
    """The row of a turn that was not measured. context: where its prompt ends, in tokens; kind: why
    it was skipped, the same for all turns that are to be named together; reason: what more there is
    to say of this one."""
    why = {"kind": kind, "reason": reason}
    return {"session": session, "turn": turn, "context": context, "skipped": why}


def fits(context: int, capacity: int) -> bool:
    """Whether a prompt that ends at `context` tokens leaves room for an answer of two: what prefill
    writes, and what a round does."""
    return context + 2 <= capacity


def unfitting_row(session: str, turn: int, context: int, capacity: int) -> Row:
    """The row of a turn that does not fit."""
    kind = f"no room for an answer in the target's context of {capacity:,} tokens"
    return skipped_row(session, turn, context, kind, f"{context:,} tokens")


def failed_row(session: str, turn: int, context: int, error: BaseException) -> Row:
    """The row of a turn that ended with an error."""
    said = one_line(error)
    if not isinstance(error, SharpDraftError):
        said = f"{type(error).__name__}: {said}"
    return skipped_row(session, turn, context, FAILED, said)


def measured(rows: Sequence[Row]) -> list[Row]:
    """The rows of turns that were measured."""
    return [row for row in rows if "skipped" not in row]


def row_of(rows: Sequence[Row], session: str, turn: int) -> Row | None:
    """The row of a turn, if it was measured."""
    found = (row for row in rows if row["session"] == session and row["turn"] == turn)
    return next(found, None)


def measured_turns(recording: Recording, plan: Plan, limit: int) -> list[int]:
    """Numbers of the turns to measure, `limit` tokens being the longest context: spread evenly over
    each bucket, the last one at its upper end."""
    chosen: list[int] = []
    limit = min(limit, len(recording.tokens))
    for low, high in map(bounds, range(bucket_of(limit) + 1)):
        inside = [
            i
            for i, turn in enumerate(recording.turns)
            if low < turn.answer
            and turn.end <= min(high, limit)
            and turn.end - turn.answer >= _SHORTEST
        ]
        count = min(plan.turns_per_bucket, len(inside))
        chosen += [inside[len(inside) - 1 - (k * len(inside)) // count] for k in range(count)][::-1]
    return chosen
