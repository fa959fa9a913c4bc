"""From the rows of a run to what a person reads: figures by context length with intervals, a table,
a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ..errors import SharpDraftError
from ..workloads.tasks import bucket_of

_RESAMPLES = 2000

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval from resampling sessions; the interval is None with fewer than
    three."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return (
            f"{self.value:.2f}"
            if self.low is None
            else f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"
        )


@dataclass(frozen=True)
class Cell:
    """One arm in one context bucket. speed is in tokens per second, speedup over AR in the same
    turns."""

    arm: str
    bucket: int
    turns: int
    tokens: int
    speed: Estimate | None
    speedup: Estimate | None
    mal: Estimate | None
    gain: Estimate | None
    mass: Estimate | None


def summarise(rows: Rows, edges: Sequence[int]) -> list[Cell]:
    """Every arm in every bucket that was measured. `gain` is MAL minus Frozen's on the same
    text."""
    cells = []
    for bucket in range(len(edges)):
        inside = [row for row in rows if bucket_of(row["context"], edges) == bucket]
        if not inside:
            continue
        names = list(inside[0]["arms"]) + [
            n for n in inside[0]["replayed"] if n not in inside[0]["arms"]
        ]
        for name in sorted(names, key=_order):
            cells.append(_cell(name, bucket, inside))
    return cells


def _cell(name: str, bucket: int, rows: Rows) -> Cell:
    timed, replayed = name in rows[0]["arms"], name in rows[0]["replayed"]
    place = "arms" if timed else "replayed"
    frozen = f"{name.rpartition(':')[0]}:frozen".removeprefix(":")
    drafting, ar, compared = (
        name != "ar",
        "ar" in rows[0]["arms"],
        frozen in rows[0][place] and name != frozen,
    )
    # A short answer has no anchor to measure at, so that one row may lack what others have.
    massed = replayed and any(row["replayed"][name].get("mass") for row in rows)

    def over(of: Callable[[Rows], float], wanted: bool) -> Estimate | None:
        return _estimate(rows, of) if wanted else None

    return Cell(
        arm=name,
        bucket=bucket,
        turns=len(rows),
        tokens=sum(row[place][name]["tokens"] for row in rows),
        speed=over(lambda part: _speed(part, name), timed),
        speedup=over(
            lambda part: _speed(part, name) / _speed(part, "ar"), timed and drafting and ar
        ),
        mal=over(lambda part: _mal(part, place, name), drafting),
        gain=over(
            lambda part: _mal(part, place, name) - _mal(part, place, frozen), drafting and compared
        ),
        mass=over(lambda part: _mass(part, name), massed),
    )


def _order(name: str) -> tuple[str, int, float, str]:
    drafter, _, own = name.rpartition(":")
    kind, _, number = own.partition("@")
    known = ["ar", "frozen", "sharpdraft", "fixed", "window"]
    if kind not in known:  # a server that was given a name of its own
        return ("", len(known), 0.0, name)
    return (drafter, known.index(kind), float(number or 0), name)


def _estimate(rows: Rows, of: Callable[[Rows], float]) -> Estimate:
    sessions = sorted({row["session"] for row in rows})
    value = of(rows)
    if len(sessions) < 3:
        return Estimate(value)
    grouped = [[row for row in rows if row["session"] == name] for name in sessions]
    rng = np.random.default_rng(0)
    draws = rng.integers(len(grouped), size=(_RESAMPLES, len(grouped)))
    values = [of([row for i in draw for row in grouped[i]]) for draw in draws]
    # A draw of sessions in which nothing was drafted has no MAL.
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def _mal(rows: Rows, place: str, name: str) -> float:
    rounds = accepted = 0
    for row in rows:
        arm = row[place][name]
        # A server counts its drafts itself; an engine of ours tells every round.
        drafts, _, right = arm.get("counts") or (
            len(arm["rounds"]),
            0,
            sum(r[2] for r in arm["rounds"]),
        )
        rounds, accepted = rounds + drafts, accepted + right
    return 1 + accepted / rounds if rounds else float("nan")


def _speed(rows: Rows, name: str) -> float:
    arms = [row["arms"][name] for row in rows]
    return float(sum(a["tokens"] for a in arms) / sum(a["seconds"] for a in arms))


def _mass(rows: Rows, name: str) -> float:
    masses = [mass for row in rows for _, mass in row["replayed"][name]["mass"]]
    return sum(masses) / len(masses) if masses else float("nan")


def label(bucket: int, edges: Sequence[int]) -> str:
    """A bucket as people write it, such as 1K-2K."""

    def short(n: int) -> str:
        return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n)

    return f"{short(edges[bucket - 1]) if bucket else 0}-{short(edges[bucket])}"


def table(cells: Sequence[Cell], edges: Sequence[int], title: str) -> Table:
    """The cells as a terminal table; columns nobody measured are left out."""
    shown = Table(title=title, title_justify="left")
    for heading in ("context", "arm"):
        shown.add_column(heading)
    columns: list[tuple[str, Callable[[Cell], Estimate | None]]] = [
        ("tokens/s", lambda c: c.speed),
        ("x AR", lambda c: c.speedup),
        ("MAL", lambda c: c.mal),
        ("MAL - Frozen's", lambda c: c.gain),
        ("top-32 mass", lambda c: c.mass),
    ]
    columns = [(h, get) for h, get in columns if any(get(c) is not None for c in cells)]
    for heading, _ in columns:
        shown.add_column(heading, justify="right")
    last = None
    for cell in cells:
        if last is not None and cell.bucket != last:
            shown.add_section()
        name = label(cell.bucket, edges) if cell.bucket != last else ""
        last = cell.bucket
        shown.add_row(
            name, cell.arm, *("" if (e := get(cell)) is None else str(e) for _, get in columns)
        )
    return shown


def figure(cells: Sequence[Cell], edges: Sequence[int], path: Path, title: str) -> None:
    """Tokens per second, mean accepted length and attention mass by context length, as a PNG.

    Raises SharpDraftError if matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise SharpDraftError(
            'the figure needs matplotlib: pip install "sharpdraft[lab]"'
        ) from error
    panels: list[tuple[str, Callable[[Cell], Estimate | None]]] = [
        ("tokens per second", lambda c: c.speed),
        ("mean accepted length", lambda c: c.mal),
        ("top-32 attention mass", lambda c: c.mass),
    ]
    panels = [(h, get) for h, get in panels if any(get(c) is not None for c in cells)]
    fig, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), squeeze=False)
    arms = sorted({c.arm for c in cells}, key=_order)
    buckets = sorted({c.bucket for c in cells})
    # One colour an arm in every panel; grey for the baseline, blue to red for what is compared.
    fixed = {"ar": "#7f7f7f", "frozen": "#1f77b4", "sharpdraft": "#d62728"}
    spare = plt.get_cmap("Dark2")
    colours = {name: fixed.get(name, spare(i % 8)) for i, name in enumerate(arms)}
    for axis, (heading, get) in zip(axes[0], panels, strict=True):
        for number, name in enumerate(arms):
            points = [(c.bucket, e) for c in cells if c.arm == name and (e := get(c)) is not None]
            if not points:
                continue
            # Intervals that overlap are drawn side by side.
            x = np.array([buckets.index(b) for b, _ in points]) + 0.04 * (number - len(arms) / 2)
            y = np.array([e.value for _, e in points])
            axis.plot(x, y, marker="o", label=name, color=colours[name])
            if all(e.low is not None and e.high is not None for _, e in points):
                low = y - np.array([e.low for _, e in points], dtype=float)
                high = np.array([e.high for _, e in points], dtype=float) - y
                axis.errorbar(
                    x,
                    y,
                    yerr=np.maximum([low, high], 0),
                    fmt="none",
                    color=colours[name],
                    alpha=0.4,
                )
        axis.set_xticks(range(len(buckets)), [label(b, edges) for b in buckets])
        axis.set_xlabel("context length, tokens")
        axis.set_title(heading)
        axis.grid(alpha=0.25)
        axis.set_ylim(bottom=0 if heading != "mean accepted length" else 1)
        axis.legend(fontsize=8)
    fig.suptitle(title, fontsize=10)
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)
    plt.close(fig)
