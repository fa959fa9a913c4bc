"""Runs of recorded sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sharpdraft.decode.session import Session
from sharpdraft.lab.measure import run_recording
from sharpdraft.lab.plan import RunLog, measured_turns
from sharpdraft.workloads.tasks import Recording, Turn
from support.drafters import make_drafter
from support.lab import plan_of, without_times
from support.tiny import VOCAB, Tiny, continuation


def written_recording(tiny: Tiny) -> Recording:
    tokens: list[int] = []
    turns = []
    for number in range(5):
        start = len(tokens)
        tokens += [VOCAB - 1] * bool(number) + [20 + number, 3 * number, 7]
        turns.append(Turn(start, len(tokens), len(tokens) + 36))
        tokens += continuation(tiny.model, tokens, 36)
    return Recording("w", tuple(tokens), tuple(turns))


def test_recorded_run_and_its_resumption(llama: Tiny, tmp_path: Path) -> None:
    recording = written_recording(llama)
    plan = plan_of("ar", "frozen", "sharpdraft", replayed=("frozen",), turns_per_bucket=3)
    numbers = measured_turns(recording, plan, 250)
    assert numbers == [1, 3, 4]

    def run(done: list[dict[str, Any]], *, stop_after: int = 99) -> list[dict[str, Any]]:
        log = RunLog(tmp_path / f"{stop_after}.jsonl", plan)
        for row in done:
            log.add(row)

        def on_row(row: dict[str, Any]) -> None:
            log.add(row)
            if len(log.rows) == stop_after:
                raise KeyboardInterrupt

        session = Session(llama.target, make_drafter(llama.target))
        run_recording(session, recording, plan, (VOCAB - 1,), log.rows, on_row)
        return log.rows

    whole = run([])
    assert [row["turn"] for row in whole] == numbers
    for row in whole:
        turn = recording.turns[row["turn"]]
        assert (row["session"], row["context"]) == ("w", turn.answer)
        assert row["tokens"] == list(recording.tokens[turn.answer : turn.end])
        assert row["differences"] == {}
    with pytest.raises(KeyboardInterrupt):
        run([], stop_after=2)
    kept = RunLog(tmp_path / "2.jsonl", plan).rows
    assert len(kept) == 2
    assert without_times(run(kept, stop_after=98)) == without_times(whole)
