"""Buckets, and that every context is in one that the table shows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sharpdraft.lab.buckets import bounds, bucket_of, label
from sharpdraft.lab.plan import measured_turns
from sharpdraft.lab.statistics import summarise
from sharpdraft.lab.table import table
from sharpdraft.workloads.tasks import Recording, Turn
from support.lab import plan_of

EDGES = (512, 1024, 2048, 4096, 8192)
"""Where buckets ended when they had an end."""
CONTEXTS = st.one_of(
    st.integers(1, 2_000_000),
    st.integers(9, 21).flatmap(lambda n: st.sampled_from([2**n - 1, 2**n, 2**n + 1])),
)


def test_labels() -> None:
    ends = [1, 512, 513, 1024, 1025, 8192, 8193, 16_385, 40_000, 65_537, 262_144, 262_145]
    assert [label(bucket_of(end)) for end in ends] == [
        "0-512",
        "0-512",
        "512-1K",
        "512-1K",
        "1K-2K",
        "4K-8K",
        "8K-16K",
        "16K-32K",
        "32K-64K",
        "64K-128K",
        "128K-256K",
        "256K-512K",
    ]


@given(CONTEXTS)
def test_every_context_is_in_one_bucket(context: int) -> None:
    bucket = bucket_of(context)
    inside = [n for n in range(30) if bounds(n)[0] < context <= bounds(n)[1]]
    assert inside == [bucket]


@given(st.lists(CONTEXTS, min_size=1, max_size=30))
def test_the_table_shows_every_row(contexts: list[int]) -> None:
    figures = {"tokens": 4, "seconds": 2.0, "rounds": [(9, 5, 1)]}
    rows: list[dict[str, Any]] = [
        {"session": f"s{n}", "turn": 0, "context": context, "tokens": [1] * 4}
        | {"arms": {"ar": figures, "frozen": figures}, "replayed": {}}
        for n, context in enumerate(contexts)
    ]
    cells = summarise(rows)
    turns: Counter[str] = Counter()
    for cell in cells:
        turns[cell.arm] += cell.turns
    assert turns == {"ar": len(rows), "frozen": len(rows)}
    drawn, left_out = table(cells)
    shown = [str(text) for text in drawn.columns[0]._cells if str(text)]
    assert shown == [label(n) for n in sorted({bucket_of(context) for context in contexts})]
    assert drawn.row_count == len(cells) == 2 * len(shown) and left_out == ""


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 300)), max_size=60),
    st.integers(1, 5),
    st.sampled_from([1000, 4096, 8192]),
)
def test_short_recordings_are_measured_where_they_always_were(
    lengths: list[tuple[int, int]], per_bucket: int, limit: int
) -> None:
    turns, at = [], 0
    for prompt, answer in lengths:
        if at + prompt + answer <= EDGES[-1]:
            turns.append(Turn(at, at + prompt, at + prompt + answer))
            at += prompt + answer
    recording = Recording("r", tuple(range(at)), tuple(turns))
    expected: list[int] = []
    low = 0
    for edge in EDGES:
        inside = [
            number
            for number, turn in enumerate(turns)
            if low < turn.answer and turn.end <= min(edge, limit, at)
            if turn.end - turn.answer >= 32
        ]
        count = min(per_bucket, len(inside))
        expected += sorted(inside[len(inside) - 1 - k * len(inside) // count] for k in range(count))
        low = edge
    plan = plan_of("ar", turns_per_bucket=per_bucket)
    assert measured_turns(recording, plan, limit) == expected


def test_long_recordings_are_measured_to_their_end() -> None:
    turns = [Turn(at, at + 100, at + 200) for at in range(0, 200_000, 200)]
    recording = Recording("r", tuple(range(200_000)), tuple(turns))
    numbers = measured_turns(recording, plan_of("ar"), 262_144)
    labels = [label(bucket_of(turns[number].answer)) for number in numbers]
    assert labels == [label(bucket) for bucket in range(10)] and labels[-1] == "128K-256K"
    assert numbers[-1] == len(turns) - 1
    assert measured_turns(recording, plan_of("ar"), 20_000)[-1] == 99
