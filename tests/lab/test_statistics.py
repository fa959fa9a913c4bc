"""Intervals against a plain loop, and arms told apart by what they are, not by their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from sharpdraft.lab.arms import arms_of
from sharpdraft.lab.statistics import Cell, Estimate, summarise
from sharpdraft.method.policies import FixedSlope
from sharpdraft.method.settings import DraftSettings

OWN = DraftSettings(FixedSlope(512))


def figures(rounds: Sequence[int], seconds: float, masses: Sequence[float] = ()) -> dict[str, Any]:
    return {
        "tokens": 10 + len(rounds) + sum(rounds),
        "seconds": seconds,
        "rounds": [(100, 5, accepted) for accepted in rounds],
        "mass": [(100 + i, mass) for i, mass in enumerate(masses)],
    }


def random_rows(sessions: int, seed: int = 0) -> list[dict[str, Any]]:
    """One to three turns a session, of some of which nothing was drafted."""
    rng = np.random.default_rng(seed)
    rows = []
    for session in range(sessions):
        for turn in range(rng.integers(1, 4)):

            def arm() -> dict[str, Any]:
                rounds = rng.integers(0, 6, rng.integers(0, 9)).tolist()
                return figures(rounds, rng.uniform(0.5, 2), rng.uniform(0, 1, 2).tolist())

            arms = {name: arm() for name in ("ar", "frozen", "sharpdraft")}
            replayed = {"sharpdraft": arms["sharpdraft"]}
            rows.append(
                {"session": f"s{session}", "turn": turn, "context": 100, "arms": arms}
                | {"replayed": replayed}
            )
    return rows


def mal(rows: Sequence[dict[str, Any]], name: str) -> float:
    rounds = [accepted for row in rows for _, _, accepted in row["arms"][name]["rounds"]]
    return 1 + sum(rounds) / len(rounds) if rounds else float("nan")


def speed(rows: Sequence[dict[str, Any]], name: str) -> float:
    arms = [row["arms"][name] for row in rows]
    return sum(arm["tokens"] for arm in arms) / sum(arm["seconds"] for arm in arms)


def mass(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([m for row in rows for _, m in row["replayed"][name]["mass"]]))


def resampled(
    rows: Sequence[dict[str, Any]], of: Callable[[Sequence[dict[str, Any]]], float]
) -> tuple[float, float, float]:
    """The figure and its interval, by drawing sessions one by one and doing all sums anew."""
    rng = np.random.default_rng(7)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["session"], []).append(row)
    names = list(groups)
    values = []
    for _ in range(2000):
        drawn = rng.integers(0, len(names), len(names))
        values.append(of([row for i in drawn for row in groups[names[i]]]))
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return of(rows), float(low), float(high)


def test_intervals_are_those_of_a_plain_loop() -> None:
    rows = random_rows(12)
    (cell,) = (each for each in summarise(rows, (512,)) if each.arm == "sharpdraft")
    expected: dict[str, Callable[[Sequence[dict[str, Any]]], float]] = {
        "speed": lambda part: speed(part, "sharpdraft"),
        "speedup": lambda part: speed(part, "sharpdraft") / speed(part, "ar"),
        "mal": lambda part: mal(part, "sharpdraft"),
        "gain": lambda part: mal(part, "sharpdraft") - mal(part, "frozen"),
        "mass": lambda part: mass(part, "sharpdraft"),
    }
    for name, of in expected.items():
        found: Estimate = getattr(cell, name)
        assert found.low is not None and found.high is not None
        value, low, high = resampled(rows, of)
        assert found.value == pytest.approx(value, rel=1e-12), name
        # Two lots of 2,000 draws differ by some hundredths of the interval.
        assert abs(found.low - low) + abs(found.high - high) < 0.1 * (high - low), name


def test_sessions_without_a_draft_and_runs_without_one() -> None:
    rows = random_rows(5)
    for row in rows:
        if row["session"] != "s0":
            row["arms"]["frozen"]["rounds"] = []
    cells = {cell.arm: cell for cell in summarise(rows, (512,))}
    found = cells["frozen"].mal
    assert found is not None and found.low == found.high == pytest.approx(mal(rows, "frozen"))
    for row in rows:
        row["arms"]["frozen"]["rounds"] = []
    cells = {cell.arm: cell for cell in summarise(rows, (512,))}
    found = cells["frozen"].mal
    assert found is not None and np.isnan(found.value) and found.low is None


def cells_of(*names: str, replayed: Sequence[str] = ()) -> list[Cell]:
    """One row of two drafters, an arm's MAL being 1 more than its number in it."""
    drafters = {"one": OWN, "b:two": OWN}
    timed, others = arms_of(names, drafters), arms_of(replayed, drafters)
    arms = {arm.name: figures([i], 1.0) for i, arm in enumerate(timed)}
    more = {arm.name: figures([len(arms) + i], 1.0) for i, arm in enumerate(others)}
    row = {"session": "s", "turn": 0, "context": 100, "arms": arms, "replayed": more}
    return summarise([row], (512,), (*timed, *others))


def test_arms_of_a_drafter_stand_together_whatever_they_are_called() -> None:
    cells = cells_of("sharpdraft@512:slope=3", "ar", "frozen", replayed=["window@64+fixed@2"])
    assert [cell.arm for cell in cells] == [
        "ar",
        "one:sharpdraft@512:slope=3",
        "one:frozen",
        "one:window@64+fixed@2",
        "b:two:sharpdraft@512:slope=3",
        "b:two:frozen",
        "b:two:window@64+fixed@2",
    ]
    found = {cell.arm: cell.gain and cell.gain.value for cell in cells}
    # Only what was measured on the same text is compared: no timed Frozen for a replayed arm.
    assert found == dict.fromkeys(found) | {
        "one:sharpdraft@512:slope=3": -1.0,
        "b:two:sharpdraft@512:slope=3": -1.0,
    }


def test_gain_is_over_frozen_of_the_same_length() -> None:
    cells = cells_of("frozen", "frozen+drafts@2", "sharpdraft", "sharpdraft+drafts@2")
    assert [cell.gain and cell.gain.value for cell in cells[:4]] == [None, None, 2.0, 2.0]
