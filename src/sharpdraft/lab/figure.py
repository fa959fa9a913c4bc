"""Figures by context length as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SharpDraftError
from .buckets import label
from .statistics import Cell, Estimate

_PANELS: dict[str, Callable[[Cell], Estimate | None]] = {
    "tokens per second": lambda cell: cell.speed,
    "mean accepted length": lambda cell: cell.mal,
    "top-32 attention mass": lambda cell: cell.mass,
}
# Grey for the baseline, blue to red for what is compared in a demo.
_COLOURS = {"ar": "#7f7f7f", "frozen": "#1f77b4", "sharpdraft": "#d62728"}


def figure(cells: Sequence[Cell], path: Path, title: str) -> None:
    """Tokens per second, mean accepted length and attention mass by context length, as a PNG, a row
    of panels for each workload.

    Raises SharpDraftError if matplotlib is not installed, or there is nothing to draw.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise SharpDraftError(
            'the figure needs matplotlib: pip install "sharpdraft[lab]"'
        ) from error
    panels = {
        heading: get
        for heading, get in _PANELS.items()
        if any(get(cell) is not None for cell in cells)
    }
    if not panels:
        raise SharpDraftError("there is no figure: nothing was measured that it would show")
    buckets = sorted({cell.bucket for cell in cells})
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    # One colour an arm in every panel, in the order of the table.
    spare = plt.get_cmap("Dark2")
    names = dict.fromkeys(cell.arm for cell in cells)
    colours = {name: _COLOURS.get(name, spare(i % 8)) for i, name in enumerate(names)}
    # Room for every label.
    size = (max(4.6, 0.8 * len(buckets)) * len(panels), 3.8 * len(workloads))
    drawn, axes = plt.subplots(len(workloads), len(panels), figsize=size, squeeze=False)
    every = ((workload, *panel) for workload in workloads for panel in panels.items())
    for axis, (workload, heading, get) in zip(axes.flat, every, strict=True):
        own = [cell for cell in cells if cell.workload == workload]
        _panel(axis, own, get, colours, buckets)
        axis.set_xticks(range(len(buckets)), [label(b) for b in buckets])
        axis.set_xlabel("context length, tokens")
        axis.set_title(f"{workload}: {heading}" if len(workloads) > 1 else heading)
        axis.grid(alpha=0.25)
        axis.set_ylim(bottom=0 if heading != "mean accepted length" else 1)
        axis.legend(fontsize=8)
    drawn.suptitle(title, fontsize=10, parse_math=False)
    drawn.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=130)
    plt.close(drawn)


def _panel(
    axis: Any,
    cells: Sequence[Cell],
    get: Callable[[Cell], Estimate | None],
    colours: dict[str, Any],
    buckets: Sequence[int],
) -> None:
    """A line with intervals for each arm."""
    for number, (name, colour) in enumerate(colours.items()):
        points = [(c.bucket, e) for c in cells if c.arm == name and (e := get(c)) is not None]
        if not points:
            continue
        # Intervals that overlap are drawn side by side.
        x = np.array([buckets.index(b) for b, _ in points]) + 0.04 * (number - len(colours) / 2)
        y = np.array([e.value for _, e in points])
        axis.plot(x, y, marker="o", label=name, color=colour)
        bounds = np.array([[e.low, e.high] for _, e in points], dtype=float)
        known = ~np.isnan(bounds).any(1)
        if known.any():
            x, y, bounds = x[known], y[known], bounds[known]
            errors = np.maximum([y - bounds[:, 0], bounds[:, 1] - y], 0)
            axis.errorbar(x, y, yerr=errors, fmt="none", color=colour, alpha=0.4)
