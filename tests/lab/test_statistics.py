"""Intervals against a plain loop, and arms told apart by what they are, not by their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpdraft.lab.arms import arms_of
from sharpdraft.lab.novelty import Repetition
from sharpdraft.lab.statistics import (
    Cell,
    Estimate,
    Undrafted,
    repetition,
    summarise,
    undrafted,
)
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
    (cell,) = (each for each in summarise(rows) if each.arm == "sharpdraft")
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
    cells = {cell.arm: cell for cell in summarise(rows)}
    found = cells["frozen"].mal
    assert found is not None and found.low == found.high == pytest.approx(mal(rows, "frozen"))
    for row in rows:
        row["arms"]["frozen"]["rounds"] = []
    cells = {cell.arm: cell for cell in summarise(rows)}
    assert cells["frozen"].mal is None and cells["sharpdraft"].gain is None


def cells_of(*names: str, replayed: Sequence[str] = ()) -> list[Cell]:
    """One row of two drafters, an arm's MAL being 1 more than its number in it."""
    drafters = {"one": OWN, "b:two": OWN}
    timed, others = arms_of(names, drafters), arms_of(replayed, drafters)
    arms = {arm.name: figures([i], 1.0) for i, arm in enumerate(timed)}
    more = {arm.name: figures([len(arms) + i], 1.0) for i, arm in enumerate(others)}
    row = {"session": "s", "turn": 0, "context": 100, "arms": arms, "replayed": more}
    return summarise([row], (*timed, *others))


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


Rounds = list[tuple[int, int]]
"""Drafted and accepted tokens of the rounds of an answer."""


def answer(context: int, rounds: Rounds) -> dict[str, Any]:
    """A row as `measure_turn` writes it, of one arm that was timed and replayed."""
    found, at = [], context
    for drafted, accepted in rounds:
        found += [(at, drafted, accepted)] if drafted else []
        at += accepted + 1
    tokens = 1 + at - context
    arm = {"tokens": tokens, "seconds": 1.0, "rounds": found}
    alone = {"tokens": tokens, "seconds": 1.0, "rounds": []}
    # A replay begins behind the token of prefill; arms that were also timed are copied.
    replayed = {"frozen": arm, "fixed@1.2": arm | {"tokens": tokens - 1}}
    row = {"session": f"s{context}", "turn": 0, "context": context, "tokens": [7] * tokens}
    return row | {"arms": {"ar": alone, "frozen": arm}, "replayed": replayed}


def test_rounds_without_drafts_are_told() -> None:
    rows = [
        answer(100, [(5, 1), (5, 0), (4, 4)]),
        answer(200, [(5, 1), (5, 0), (0, 0)]),  # One token was left to write.
        answer(300, [(5, 2), (5, 0), *[(0, 0)] * 16]),
        answer(400, [(0, 0)] * 9),
    ]
    for name, found in zip(("frozen", "fixed@1.2"), undrafted(rows), strict=True):
        assert found == Undrafted(name, 25, 2, 4, 304)
    assert undrafted(rows[:2]) == undrafted([]) == []
    (mal,) = (cell.mal for cell in summarise(rows) if cell.arm == "fixed@1.2")
    assert mal is not None and mal.value == pytest.approx(1 + 8 / 7), "of rounds with drafts"


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=9), st.integers(2, 40))
def test_all_rounds_without_drafts_are_counted(drafting: Rounds, without: int) -> None:
    drafting = [(drafted, min(drafted, accepted)) for drafted, accepted in drafting]
    row = answer(1000, [*drafting, *[(0, 0)] * without])
    reached = 1000 + sum(accepted + 1 for _, accepted in drafting)
    for found in undrafted([row]):
        assert (found.rounds, found.turns, found.context) == (without, 1, reached)


@pytest.mark.parametrize(
    ("figures", "tokens", "expected"),
    [
        ({"rounds": [(100, 5, 2)] * 4}, [[1] * 7, [2] * 7], 0),
        ({"rounds": [(100, 5, 2)] * 2}, [[1] * 7, [2] * 7], 6),
        ({"rounds": [], "counts": [4, 20, 8], "tokens": 14}, ["a text", "b"], 0),
        ({"rounds": [], "counts": [0, 0, 0], "tokens": 14}, ["a text", "b"], 12),
        ({"rounds": [], "tokens": 14}, ["a text", "b"], 0),  # It does not say.
    ],
)
def test_rounds_without_drafts_elsewhere(
    figures: dict[str, Any], tokens: list[Any], expected: int
) -> None:
    """Engines tell every round, servers totals or nothing; two requests have two prefills."""
    arms = {"ar": {"tokens": 12, "rounds": []}, "frozen": {"tokens": 12, **figures}}
    row = {"session": "a+b", "turn": 0, "context": 70, "requests": 2, "tokens": tokens}
    found = undrafted([row | {"arms": arms, "replayed": {}}])
    assert [(each.arm, each.rounds, each.context) for each in found] == (
        [("frozen", expected, 70)] if expected else []
    )


def marked(rows: list[dict[str, Any]], seed: int = 3) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    for row in rows:
        for arm in (*row["arms"].values(), *row["replayed"].values()):
            arm["new"] = "".join(rng.choice(["0", "1"], len(arm["rounds"])))
    return rows


def test_mal_of_new_rounds_is_that_of_a_plain_loop() -> None:
    rows = marked(random_rows(12))

    def fresh(part: Sequence[dict[str, Any]]) -> float:
        arms = [row["arms"]["sharpdraft"] for row in part]
        kept = [r[2] for a in arms for r, m in zip(a["rounds"], a["new"], strict=True) if m == "1"]
        return 1 + sum(kept) / len(kept) if kept else float("nan")

    (cell,) = (each for each in summarise(rows) if each.arm == "sharpdraft")
    value, low, high = resampled(rows, fresh)
    found = cell.mal_new
    assert found is not None and found.low is not None and found.high is not None
    assert found.value == pytest.approx(value) and cell.mal is not None
    assert found.value != pytest.approx(cell.mal.value)
    assert abs(found.low - low) + abs(found.high - high) < 0.1 * (high - low)


def test_rows_of_older_runs_have_no_new_rounds() -> None:
    assert all(cell.mal_new is None for cell in summarise(random_rows(4)))
    rows = marked(random_rows(4))
    del rows[0]["arms"]["frozen"]["new"]
    cells = {cell.arm: cell for cell in summarise(rows)}
    assert cells["frozen"].mal_new is None and cells["sharpdraft"].mal_new is not None
    assert cells["ar"].mal_new is None
    assert repetition(rows) == {}
    for row in rows:
        for arm in row["arms"].values():
            arm["new"] = "0" * len(arm["rounds"])
    assert {cell.mal_new for cell in summarise(rows)} == {None}


def test_workloads_are_kept_apart() -> None:
    rows = random_rows(6)
    for number, row in enumerate(rows):
        row["workload"] = "far" if number % 2 else "code"
        row["repetition"] = asdict(Repetition(10, number, 0, 0, 0))
    cells = summarise(rows)
    assert [(c.workload, c.arm) for c in cells] == [
        (workload, arm) for workload in ("code", "far") for arm in ("ar", "frozen", "sharpdraft")
    ]
    for cell in cells:
        own = [row for row in rows if row["workload"] == cell.workload]
        assert cell.turns == len(own)
        assert cell.mal is None or cell.mal.value == pytest.approx(mal(own, cell.arm))
    found = repetition(rows)
    odd = range(1, len(rows), 2)
    assert found["far"] == Repetition(10 * len(odd), sum(odd), 0, 0, 0)
    del rows[1]["repetition"]
    assert list(repetition(rows)) == ["code"]
