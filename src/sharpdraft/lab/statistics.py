"""From the rows of a run to figures by context length, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decode.session import Arm
from ..method.settings import FROZEN
from .arms import AR
from .buckets import bucket_of
from .novelty import Repetition
from .plan import Row

_RESAMPLES = 2000
_FIGURES = ("speed", "speedup", "mal", "gain", "mass", "mal_new")

_Part = Callable[[Row], float]
"""What a row adds to a sum."""
_Values = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval from resampling sessions; the interval is None with fewer than
    three."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{interval}"


@dataclass(frozen=True)
class Cell:
    """One arm in one context bucket of one workload, "" where none was named. speed is in tokens
    per second, speedup over AR in the same turns; gain is MAL minus Frozen's on the same text;
    mal_new is that of the rounds whose anchor ends four tokens that are new in the text, None where
    a row does not say which they are."""

    arm: str
    bucket: int
    turns: int
    tokens: int
    speed: Estimate | None
    speedup: Estimate | None
    mal: Estimate | None
    gain: Estimate | None
    mass: Estimate | None
    mal_new: Estimate | None = None
    workload: str = ""


def summarise(rows: Sequence[Row], arms: Sequence[Arm] = ()) -> list[Cell]:
    """Every arm in every bucket of every workload that was measured, drafter by drafter.

    arms: those of the plan; a name that is none of theirs, such as a server's, is told by its name.
    """
    cells = []
    for measured in by_workload(rows).values():
        inside: dict[int, list[Row]] = {}
        for row in measured:
            inside.setdefault(bucket_of(row["context"]), []).append(row)
        for bucket, own in sorted(inside.items()):
            known = _ordered(own[0], arms)
            cells += [_cell(arm, known, bucket, own) for arm in known]
    return cells


def by_workload(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each workload, in the order in which they were measured."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.get("workload", ""), []).append(row)
    return found


def repetition(rows: Sequence[Row]) -> dict[str, Repetition]:
    """How much the measured answers of each workload repeat their texts; nothing of a workload with
    rows that do not say so, as older runs' and servers'."""
    return {
        workload: Repetition.total(row["repetition"] for row in own)
        for workload, own in by_workload(rows).items()
        if all("repetition" in row for row in own)
    }


@dataclass(frozen=True)
class Undrafted:
    """An arm that stopped drafting: rounds without drafts, in how many turns of how many, and the
    shortest context, in tokens, at which one of them had none."""

    arm: str
    rounds: int
    turns: int
    measured: int
    context: int


def undrafted(rows: Sequence[Row], arms: Sequence[Arm] = ()) -> list[Undrafted]:
    """The arms that had rounds in which nothing could be drafted. Such rounds have no part in MAL.
    A last round that has one token left to write drafts nothing by itself and is not counted."""
    found = []
    for arm in _ordered(rows[0], arms) if rows else []:
        place = "arms" if arm.name in rows[0]["arms"] else "replayed"
        each = [(_without_drafts(row, place, arm.name), row) for row in rows]
        inside = [(rounds, row) for rounds, row in each if rounds]
        if arm.drafter is not None and inside:
            context = min(_drafted_to(row, place, arm.name) for _, row in inside)
            total = sum(rounds for rounds, _ in inside)
            found.append(Undrafted(arm.name, total, len(inside), len(rows), context))
    return found


def _without_drafts(row: Row, place: str, name: str) -> int:
    """Rounds of a row without drafts: of all tokens, those that neither prefill nor a round with
    drafts wrote."""
    arm, requests = row[place][name], row.get("requests", 1)
    if "counts" in arm or (place == "arms" and "requests" not in row):
        written = arm["tokens"]
    else:
        texts = row["tokens"] if "requests" in row else [row["tokens"]]
        if isinstance(texts[0], str):
            return 0  # A server that tells nothing of its drafts.
        written = sum(map(len, texts))
    drafted = _drafts(place, name, 0)(row) + _drafts(place, name, 2)(row)
    left = int(written - requests - drafted)
    return left if left > requests else 0


def _drafted_to(row: Row, place: str, name: str) -> int:
    """The context behind which a row drafted nothing; of several requests, where they began."""
    rounds = row[place][name].get("rounds")
    if not rounds or "requests" in row:
        return int(row["context"])
    context, _, accepted = rounds[-1]
    return int(context + accepted + 1)


@dataclass(frozen=True)
class _Measured:
    """An arm of a row. drafter: None for AR. frozen: whether it is its drafter as released."""

    name: str
    drafter: str | None
    frozen: bool
    drafts: int | None = None


def _measured(name: str, arm: Arm | None) -> _Measured:
    if arm is None:
        return _Measured(name, None if name == AR.name else "", name == FROZEN)
    drafting = arm.drafter is not None
    return _Measured(name, arm.drafter, drafting and not arm.settings.acts, arm.settings.drafts)


def _ordered(row: Row, arms: Sequence[Arm]) -> list[_Measured]:
    """The arms of a row: AR, then each drafter's in the order in which they were measured."""
    known = {arm.name: arm for arm in arms}
    names = dict.fromkeys((*row["arms"], *row["replayed"]))
    found = [_measured(name, known.get(name)) for name in names]
    drafters = list(dict.fromkeys(each.drafter for each in found))
    return sorted(found, key=lambda each: (each.drafter is not None, drafters.index(each.drafter)))


def _cell(arm: _Measured, arms: Sequence[_Measured], bucket: int, rows: Sequence[Row]) -> Cell:
    name = arm.name
    timed, replayed = name in rows[0]["arms"], name in rows[0]["replayed"]
    place = "arms" if timed else "replayed"
    # A short answer has no anchor to measure at, so that one row may lack what others have.
    massed = replayed and any(row["replayed"][name].get("mass") for row in rows)
    mal = [_drafts(place, name, 0), _drafts(place, name, 2)]
    speed = [_figure("arms", name, "tokens"), _figure("arms", name, "seconds")]
    found: dict[str, Estimate | None] = {}
    if timed:
        found["speed"] = _estimate(rows, np.divide, *speed)
        if arm.drafter is not None and AR.name in rows[0]["arms"]:
            alone = [_figure("arms", AR.name, "tokens"), _figure("arms", AR.name, "seconds")]
            found["speedup"] = _estimate(rows, _ratio, *speed, *alone)
    if arm.drafter is not None:
        found["mal"] = _estimate(rows, _mal, *mal)
        if all("new" in row[place][name] for row in rows):
            found["mal_new"] = _estimate(rows, _mal, _fresh(place, name, 0), _fresh(place, name, 2))
        base = None if arm.frozen else _frozen_of(arm, arms, rows[0][place])
        if base is not None:
            own = [_drafts(place, base, 0), _drafts(place, base, 2)]
            found["gain"] = _estimate(rows, _gain, *mal, *own)
    if massed:
        found["mass"] = _estimate(rows, np.divide, _mass(name, sum), _mass(name, len))
    tokens = sum(row[place][name]["tokens"] for row in rows)
    figures = {key: found.get(key) for key in _FIGURES}
    workload = rows[0].get("workload", "")
    return Cell(name, bucket, len(rows), tokens, workload=workload, **figures)


def _frozen_of(arm: _Measured, arms: Sequence[_Measured], measured: Collection[str]) -> str | None:
    """The arm that is the same drafter as released, at the same length where there is a choice."""
    bases = [e for e in arms if e.frozen and e.drafter == arm.drafter and e.name in measured]
    found = min(bases, key=lambda each: each.drafts != arm.drafts, default=None)
    return None if found is None else found.name


def _figure(place: str, name: str, key: str) -> _Part:
    return lambda row: row[place][name][key]


def _drafts(place: str, name: str, which: int) -> _Part:
    """Of a row: rounds (0) or accepted tokens (2)."""

    def part(row: Row) -> float:
        arm = row[place][name]
        # A server counts its drafts itself; an engine of ours tells every round.
        if counts := arm.get("counts"):
            return float(counts[which])
        return sum(_weighed(r, which) for r in arm.get("rounds", ()))

    return part


def _weighed(round_: Sequence[float], which: int) -> float:
    """Of a round: itself (0) or its accepted tokens (2), by how likely it was where it is an
    expected one."""
    weight = round_[3] if len(round_) > 3 else 1
    return weight * round_[which] if which else weight


def _fresh(place: str, name: str, which: int) -> _Part:
    """As `_drafts`, of the rounds whose anchor is new."""

    def part(row: Row) -> float:
        arm = row[place][name]
        pairs = zip(arm["rounds"], arm["new"], strict=True)
        return sum(_weighed(r, which) for r, mark in pairs if mark == "1")

    return part


def _mass(name: str, of: Callable[[list[float]], float]) -> _Part:
    return lambda row: of([mass for _, mass in row["replayed"][name]["mass"]])


def _mal(rounds: _Values, accepted: _Values) -> _Values:
    return 1 + accepted / rounds


def _gain(rounds: _Values, accepted: _Values, others: _Values, other: _Values) -> _Values:
    return accepted / rounds - other / others


def _ratio(tokens: _Values, seconds: _Values, others: _Values, other: _Values) -> _Values:
    return (tokens / seconds) / (others / other)


def _estimate(rows: Sequence[Row], of: Callable[..., Any], *parts: _Part) -> Estimate | None:
    """A figure that is a function of sums over rows, with its interval; None where these sums give
    none, as a MAL of no rounds."""
    names = sorted({row["session"] for row in rows})
    sums = np.zeros((len(names), len(parts)))
    for row in rows:
        sums[names.index(row["session"])] += [part(row) for part in parts]
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(of(*sums.sum(0)))
        if not np.isfinite(value):
            return None
        if len(names) < 3:
            return Estimate(value)
        return Estimate(value, *_interval(sums, of))


def _interval(sums: _Values, of: Callable[..., Any]) -> tuple[float, float]:
    """95 % of what resampled sessions say. sums [sessions, parts]: drawing sessions is weighing
    their sums by how often each was drawn."""
    count = len(sums)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), _RESAMPLES)
    # A draw of sessions in which nothing was drafted has no MAL.
    low, high = np.nanpercentile(of(*(drawn @ sums).T), [2.5, 97.5])
    return float(low), float(high)
