"""Plans, recordings and rows."""

from __future__ import annotations

import json
from typing import Any

from sharpdraft.lab.arms import arms_of
from sharpdraft.lab.plan import Plan
from sharpdraft.method.policies import FixedSlope
from sharpdraft.method.settings import DraftSettings
from sharpdraft.workloads.tasks import Recording, Turn

LOW = {"": DraftSettings(FixedSlope(33))}


def plan_of(*names: str, replayed: tuple[str, ...] = (), **options: Any) -> Plan:
    return Plan("tiny", "random", arms_of(names, LOW), arms_of(replayed, LOW), **options)


def recording_of(*lengths: tuple[int, int]) -> Recording:
    turns, at = [], 0
    for prompt, answer in lengths:
        turns.append(Turn(at, at + prompt, at + prompt + answer))
        at += prompt + answer
    return Recording("r", tuple(range(at)), tuple(turns))


def without_times(rows: list[dict[str, Any]]) -> Any:
    """Rows as they lie on disk, but for what a clock said; masses to the digits that the order of
    additions leaves."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if not k.endswith("seconds")}
        if isinstance(value, list):
            return [strip(v) for v in value]
        return round(value, 4) if isinstance(value, float) else value

    return strip(json.loads(json.dumps(rows)))
