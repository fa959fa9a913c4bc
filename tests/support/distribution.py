"""What tokens are distributed like, and whether a count of them is."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList


def surprise(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """How many deviations a chi-square statistic lies above what the distribution itself gives.
    Outcomes expected less than ten times are taken together; one that cannot be is infinitely
    surprising."""
    total = sum(counts.values())
    if any(expected.get(outcome, 0) == 0 for outcome in counts):
        return math.inf
    rare = {outcome for outcome, p in expected.items() if p * total < 10}
    cells = [(counts[o], p * total) for o, p in expected.items() if o not in rare]
    if rest := sum(expected[o] for o in rare):
        cells.append((sum(counts[o] for o in rare), rest * total))
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    degrees = len(cells) - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


def reference(model: Any, tokens: list[int], filters: LogitsProcessorList) -> Tensor:
    """The target's distribution behind `tokens`, from transformers alone."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        scores = filters(ids, model(ids).logits[:, -1].float())
    return scores[0].softmax(-1)


def pairs(model: Any, prompt: list[int], filters: LogitsProcessorList) -> dict[Any, float]:
    """The probability of every two tokens behind a prompt that have any."""
    expected: dict[tuple[int, ...], float] = {}
    first = reference(model, prompt, filters)
    for one in first.nonzero()[:, 0].tolist():
        second = reference(model, [*prompt, one], filters)
        for two in second.nonzero()[:, 0].tolist():
            expected[one, two] = float(first[one] * second[two])
    return expected
