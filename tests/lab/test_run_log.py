"""Run logs that go on where they broke off."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sharpdraft.errors import SharpDraftError
from sharpdraft.lab.plan import RunLog, measured, skipped_row
from sharpdraft.method.policies import FixedSlope
from sharpdraft.method.settings import DraftSettings
from support.disk import full_disk
from support.lab import plan_of


def test_run_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    plan = plan_of("ar", "sharpdraft")
    log = RunLog(path, plan)
    assert log.rows == []
    rows = [{"session": "a", "turn": n, "text": "β\n"} for n in range(3)]
    for row in rows:
        log.add(row)
    assert log.rows == rows
    whole = path.read_bytes()
    assert json.loads(whole.splitlines()[0]).keys() == {"plan", "machine"}
    assert RunLog(path, plan).rows == rows
    assert path.read_bytes() == whole
    # A last line cut short anywhere is dropped, and the file is whole again before the next row
    # comes.
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        log = RunLog(path, plan)
        assert log.rows == rows[: 3 if cut == len(whole) - 1 else 2]
        log.add({"session": "b"})
        assert RunLog(path, plan).rows == log.rows
    assert {p.name for p in path.parent.iterdir()} == {"rows.jsonl", "rows.lock"}


def test_run_log_trusts_nothing_behind_a_broken_row(tmp_path: Path) -> None:
    path, plan = tmp_path / "rows.jsonl", plan_of("ar")
    for turn in range(3):
        RunLog(path, plan).add({"turn": turn})
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:5], lines[3]]) + "\n")
    assert RunLog(path, plan).rows == [{"turn": 0}]


def test_run_log_cut_in_its_header(tmp_path: Path) -> None:
    path, plan = tmp_path / "rows.jsonl", plan_of("ar")
    RunLog(path, plan)
    path.write_bytes(path.read_bytes()[:20])
    assert RunLog(path, plan).rows == []
    assert RunLog(path, plan).rows == []


def test_run_log_of_another_plan_is_refused(tmp_path: Path) -> None:
    path, plan = tmp_path / "rows.jsonl", plan_of("ar", "sharpdraft")
    RunLog(path, plan).add({"session": "a"})
    before = path.read_bytes()
    other = DraftSettings(FixedSlope(34))
    others = [
        plan_of("ar", "sharpdraft+drafts@3"),
        replace(plan, drafter="other"),
        plan_of("ar", "sharpdraft@40"),
        plan_of("ar", "sharpdraft", replayed=("frozen",)),
        replace(plan, masses_every=8),
        replace(plan, timed=(*plan.timed[:1], replace(plan.timed[1], settings=other))),
    ]
    for changed in others:
        with pytest.raises(
            SharpDraftError, match="holds a run with other settings: give another --out"
        ):
            RunLog(path, changed)
    assert path.read_bytes() == before
    assert RunLog(path, plan).rows == [{"session": "a"}]


def test_run_log_of_a_plan_with_edges_goes_on(tmp_path: Path) -> None:
    """Headers once named the ends of the buckets, which were always the same."""
    path, plan = tmp_path / "rows.jsonl", plan_of("ar", "sharpdraft")
    RunLog(path, plan).add({"session": "a"})
    header, row = map(json.loads, path.read_text().splitlines())
    header["plan"]["edges"] = [512, 1024, 2048, 4096, 8192]
    path.write_text(f"{json.dumps(header)}\n{json.dumps(row)}\n")
    assert RunLog(path, plan).rows == [row]
    assert json.loads(path.read_text().splitlines()[0]) == header


def test_skipped_turns_are_tried_again(tmp_path: Path) -> None:
    path, plan = tmp_path / "rows.jsonl", plan_of("ar")
    log = RunLog(path, plan)
    rows = [{"session": "a", "turn": 0}, skipped_row("b", 0, 9, "failed", "why")]
    for row in (*rows, {"session": "c", "turn": 0}):
        log.add(row)
    assert measured(log.rows) == [rows[0], {"session": "c", "turn": 0}]
    kept = RunLog(path, plan).rows
    assert kept == measured(log.rows)
    assert len(path.read_text().splitlines()) == 3


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    """Their rows would be mixed, each measured twice."""
    path = tmp_path / "rows.jsonl"
    log = RunLog(path, plan_of("ar"))
    line = (
        "import sys\nfrom pathlib import Path\nfrom sharpdraft.lab.arms import AR\n"
        "from sharpdraft.lab.plan import Plan, RunLog\n"
        f"RunLog(Path({str(path)!r}), Plan('t', 'd', (AR,)))"
    )
    second = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
    assert "another run writes to" in second.stderr
    log.add({"session": "a"})
    del log
    third = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
    assert "another run writes to" not in third.stderr


def test_full_disk_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    log = RunLog(path, plan_of("ar"))
    log.add({"session": "a"})
    with (
        full_disk(path.stat().st_size + 20),
        pytest.raises(SharpDraftError, match=r"rows\.jsonl .*make room"),
    ):
        log.add({"session": "b", "text": "x" * 100})
    # What went in of the row that did not fit is dropped when the run goes on.
    assert RunLog(path, plan_of("ar")).rows == log.rows == [{"session": "a"}]
