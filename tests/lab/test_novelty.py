"""Repetition of texts, by hand and against loops over all earlier places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sharpdraft.lab.novelty import Repetition, lookup, marks, new

TEXTS = st.lists(st.integers(0, 3), max_size=60) | st.lists(st.integers(0, 10**6), max_size=30)


def new_by_hand(tokens: Sequence[int]) -> list[bool]:
    grams = [tuple(tokens[i - 3 : i + 1]) if i >= 3 else None for i in range(len(tokens))]
    return [gram is None or gram not in grams[:i] for i, gram in enumerate(grams)]


def lookup_by_hand(tokens: Sequence[int], at: int) -> int:
    """Draft a token at a time behind `at`, and count those that are right."""
    for length in range(12, 1, -1):
        suffix = tokens[at + 1 - length : at + 1] if length <= at + 1 else None
        ends = [e for e in range(length - 1, at) if tokens[e + 1 - length : e + 1] == suffix]
        if suffix is not None and ends:
            break
    else:
        return 0
    written = list(tokens[: at + 1])
    for step in range(1, 8):
        written.append(written[ends[-1] + step])
        if written != list(tokens[: at + 1 + step]):
            return step - 1
    return 7


@given(TEXTS)
@example([])
@example([5] * 40)
@example([1, 2, 3] * 12)
# What stands behind twelve tokens is not what stands behind the last eleven of them, later.
@example([*range(12), 50, 99, *range(1, 12), 60, *range(12), 50])
def test_new_and_lookup_are_those_of_plain_loops(tokens: list[int]) -> None:
    assert new(tokens).tolist() == new_by_hand(tokens)
    assert lookup(tokens).tolist() == [lookup_by_hand(tokens, at) for at in range(len(tokens))]


@given(TEXTS, st.integers(0, 60))
@example([5] * 40, 3)
@example([1, 2, 3] * 12, 30)
def test_repetition_of_an_answer(tokens: list[int], first: int) -> None:
    first = min(first, len(tokens))
    anchors = range(first, len(tokens) - 1)
    fresh, right = new_by_hand(tokens), [lookup_by_hand(tokens, at) for at in range(len(tokens))]
    walked, at = [], first
    while at < len(tokens) - 2:
        walked.append(min(right[at], len(tokens) - at - 2))
        at += walked[-1] + 1
    found = Repetition.of(tokens, first)
    assert found == Repetition(
        len(anchors),
        sum(not fresh[at] for at in anchors),
        sum(right[at] for at in anchors),
        len(walked),
        sum(walked),
    )
    # Every token but the first one, which prefill writes, and a last one that no draft is for.
    assert len(anchors) - (found.rounds + found.walked) in (0, 1) or not anchors


def test_known_values() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5, 7]
    assert new(text).tolist() == [True] * 9 + [False, False, True]
    # Behind the second 1 2 come 3 4 5, then the first text went on otherwise.
    assert lookup(text).tolist() == [0, 0, 0, 0, 0, 0, 0, 3, 2, 1, 0, 0]
    found = Repetition.of(text, 7)
    assert found == Repetition(positions=4, seen=2, accepted=6, rounds=1, walked=3)
    assert (found.share, found.mal, found.mal_everywhere) == (0.5, 4.0, 2.5)
    # A passage that a drafter crosses in few rounds has many positions.
    loop = Repetition.of([*range(20), *[50] * 33], 20)
    assert loop.mal is not None and loop.mal_everywhere is not None
    assert loop.mal < loop.mal_everywhere


def test_nothing_to_measure() -> None:
    for tokens, first in (([], 0), ([3], 0), ([3, 4], 2), ([3, 4], 1)):
        found = Repetition.of(tokens, first)
        assert found == Repetition() and found.share is found.mal is found.mal_everywhere is None


def test_totals_are_sums() -> None:
    parts = [asdict(Repetition(1, 2, 3, 4, 5)), asdict(Repetition(10, 20, 30, 40, 50))]
    assert Repetition.total(parts) == Repetition(11, 22, 33, 44, 55)
    assert Repetition.total([]) == Repetition()


def test_marks_of_rounds() -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 4, 4]
    assert marks(text, [(3, 5, 0), (7, 5, 1), (8, 5, 2)]) == "101"
    assert marks(text, []) == ""


@pytest.mark.parametrize("text", [[7] * 100_000, [1, 2] * 50_000])
def test_a_long_loop_is_no_special_case(text: list[int]) -> None:
    """Quadratic work would not end within a test's patience."""
    found = Repetition.of(text, 10)
    assert found.mal is not None and found.mal > 7.9
