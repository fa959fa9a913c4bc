"""Turns that are measured."""

from __future__ import annotations

from sharpdraft.lab.buckets import bounds, bucket_of
from sharpdraft.lab.plan import measured_turns
from support.lab import plan_of, recording_of


def test_measured_turns() -> None:
    recording = recording_of(*[(10, 40)] * 20, (10, 31), (10, 100), (10, 12))
    for per_bucket in (1, 2, 3, 50):
        plan = plan_of("ar", turns_per_bucket=per_bucket)
        chosen = measured_turns(recording, plan, 8192)
        assert chosen == sorted(set(chosen))
        inside: dict[int, list[int]] = {}
        for number in chosen:
            turn = recording.turns[number]
            bucket = bucket_of(turn.answer)
            assert turn.end <= bounds(bucket)[1], "an answer must not reach into the next bucket"
            assert turn.end - turn.answer >= 32
            inside.setdefault(bucket, []).append(number)
        assert [inside[b][-1] for b in range(3)] == [9, 19, 21]
        assert [len(inside[b]) for b in range(3)] == [min(per_bucket, n) for n in (10, 9, 1)]
    assert measured_turns(recording, plan_of("ar", turns_per_bucket=50), 300) == list(range(6))
    assert measured_turns(recording_of((10, 5)), plan_of("ar"), 8192) == []
