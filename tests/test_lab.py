"""The lab from outside: tasks as data, runs that go on where they broke off, figures that are what
they say."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from conftest import BLOCK, PROMPT, VOCAB, Tiny, continuation, full_disk, make_drafter
from sharpdraft.decode.session import Session
from sharpdraft.errors import SharpDraftError
from sharpdraft.lab.report import Cell, Estimate, figure, label, summarise, table
from sharpdraft.lab.runs import (
    EDGES,
    Arm,
    Plan,
    RunLog,
    arm,
    measured_turns,
    run_live,
    run_recording,
)
from sharpdraft.method.policies import Constant, FixedSlope
from sharpdraft.train.sessions import write_wave
from sharpdraft.workloads.tasks import (
    Recording,
    Task,
    Turn,
    bucket_of,
    built_in,
    from_file,
    turns_of,
)

LOW = FixedSlope(33)

# Tasks


def tasks_from(folder: Path, text: str | bytes) -> list[Task]:
    path = folder / "prompts.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return from_file(path, 50)


def test_prompts_as_text(tmp_path: Path) -> None:
    assert tasks_from(tmp_path, "Say hello.\n\n  \nWhat is β?\r\n") == [
        Task("line-1", ("Say hello.",), 50),
        Task("line-4", ("What is β?",), 50),
    ]


def test_prompts_as_json_lines(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one"},
        {"turns": ["a", "b {x}"], "name": "two"},
        {"name": 3, "prompt": "c", "other": None},
    ]
    assert tasks_from(tmp_path, "\n".join(map(json.dumps, rows))) == [
        Task("line-1", ("one",), 50),
        Task("two", ("a", "b {x}"), 50),
        Task("3", ("c",), 50),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        (" \n\t\n", "holds no prompt"),
        ('fine\n{"prompt": "x"', "line 2: not JSON"),
        ('{"prompt": ""}', 'line 1: needs "prompt"'),
        ('{"prompt": 7}', 'line 1: needs "prompt"'),
        ('fine\n\n{"other": "x"}', 'line 3: needs "prompt"'),
        ('{"turns": []}', 'line 1: needs "prompt" (text) or "turns"'),
        ('{"turns": "abc"}', "line 1: needs"),
        ('{"turns": ["a", " "]}', "line 1: needs"),
        ('{"turns": null, "prompt": "a"}', "line 1: needs"),
        (
            '{"name": "a", "prompt": "b"}\n{"name": "a", "prompt": "c"}',
            "every name must be given once",
        ),
        (b"\xff\xfe", "cannot read the prompt file"),
    ],
)
def test_prompt_files_that_are_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(SharpDraftError) as caught:
        tasks_from(tmp_path, text)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(tmp_path / "prompts.txt") in str(caught.value)


def test_prompt_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(SharpDraftError, match="cannot read the prompt file"):
            from_file(path, 5)


def test_built_in_sessions() -> None:
    tasks = built_in()
    assert len(tasks) >= 10 and len({task.name for task in tasks}) == len(tasks)
    assert all(len(task.turns) >= 30 and all(turn.strip() for turn in task.turns) for task in tasks)
    assert len({turn for task in tasks for turn in task.turns}) == sum(
        len(task.turns) for task in tasks
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_turns_of(spans: list[tuple[int, int]], tail: int) -> None:
    mask: list[bool] = []
    expected = []
    for prompt, answer in spans:
        start = len(mask)
        mask += [False] * prompt + [True] * answer
        expected.append(Turn(start, start + prompt, len(mask)))
    assert turns_of(torch.tensor(mask + [False] * tail)) == expected


def test_turns_of_a_wave_are_its_prompts_and_answers(llama: Tiny) -> None:
    turns = [[[20, 31, 14], [50, 9]], [[7], [8, 8, 40]]]
    end = Counter(llama.text[PROMPT:]).most_common(1)[0][0]
    wave = write_wave(llama.target, turns, 120, end)
    for session, tokens, written in zip(
        turns, wave["tokens"].tolist(), wave["written"], strict=True
    ):
        found = turns_of(written)
        assert len(found) > 2
        for number, turn in enumerate(found):
            prompt = tokens[turn.start : turn.answer]
            expected = session[number % 2]
            # An answer that was cut off is followed by the end of turn it lacks.
            assert prompt in (expected, [end, *expected])


def test_turns_of_nothing() -> None:
    assert turns_of(torch.zeros(5, dtype=torch.bool)) == []


def test_buckets() -> None:
    assert [bucket_of(n, (512, 1024)) for n in (1, 512, 513, 1024, 1025)] == [0, 0, 1, 1, None]
    assert [label(i, (100, 512, 1024, 4096)) for i in range(4)] == [
        "0-100",
        "100-512",
        "512-1K",
        "1K-4K",
    ]


# Arms and plans


def test_arms_by_name() -> None:
    base = FixedSlope(100, 4.0, 16, 1.3)
    assert arm("ar", base) == Arm("ar", False)
    assert arm("frozen", base) == Arm("frozen", True)
    assert arm("sharpdraft", base) == Arm("sharpdraft", True, base)
    assert arm("sharpdraft@64", base) == Arm("sharpdraft@64", True, FixedSlope(64, 4.0, 16, 1.3))
    assert arm("fixed@1.2", base) == Arm("fixed@1.2", True, Constant(1.2))
    assert arm("window@512", base) == Arm("window@512", True, None, 512)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "AR",
        "sharp",
        "fixed",
        "fixed@",
        "fixed@0",
        "fixed@-1",
        "fixed@1.2.3",
        "sharpdraft@16",
        "sharpdraft@1.5",
        "sharpdraft@x",
        "frozen@2",
        "window@0",
        "window@1.5",
        "window",
        "ar ",
    ],
)
def test_arms_that_do_not_exist(name: str) -> None:
    with pytest.raises(SharpDraftError) as caught:
        arm(name, FixedSlope(100, top_k=16))
    assert f"arm '{name}'" in str(caught.value) and "\n" not in str(caught.value)


def plan_of(*names: str, replayed: tuple[str, ...] = (), **options: Any) -> Plan:
    arms = tuple(arm(name, LOW) for name in names)
    return Plan(
        "tiny", "random", BLOCK, arms, tuple(arm(name, LOW) for name in replayed), **options
    )


def recording_of(*lengths: tuple[int, int]) -> Recording:
    turns, at = [], 0
    for prompt, answer in lengths:
        turns.append(Turn(at, at + prompt, at + prompt + answer))
        at += prompt + answer
    return Recording("r", tuple(range(at)), tuple(turns))


def test_measured_turns() -> None:
    recording = recording_of(*[(10, 40)] * 20, (10, 31), (10, 100), (10, 12))
    edges = (100, 512, 1024, 4096)
    for per_bucket in (1, 2, 3, 50):
        plan = plan_of("ar", edges=edges, turns_per_bucket=per_bucket)
        chosen = measured_turns(recording, plan, 8192)
        assert chosen == sorted(set(chosen))
        inside: dict[int, list[int]] = {}
        for number in chosen:
            turn = recording.turns[number]
            bucket = bucket_of(turn.answer, edges)
            assert bucket is not None and turn.end <= edges[bucket], (
                "an answer must not reach into the next bucket"
            )
            assert turn.end - turn.answer >= 32
            inside.setdefault(bucket, []).append(number)
        assert [inside[0][-1], inside[1][-1]] == [1, 9]
        assert [len(inside[b]) for b in range(3)] == [min(per_bucket, n) for n in (2, 8, 9)]
    assert measured_turns(recording, plan_of("ar", edges=edges, turns_per_bucket=50), 300) == list(
        range(6)
    )
    assert measured_turns(recording_of((10, 5)), plan_of("ar"), 8192) == []


# Run log


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
    assert [p.name for p in path.parent.iterdir()] == ["rows.jsonl"]


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
    others = [
        replace(plan, block=4),
        replace(plan, drafter="other"),
        plan_of("ar", "sharpdraft@40"),
        plan_of("ar", "sharpdraft", replayed=("frozen",)),
        replace(plan, masses_every=8),
        replace(plan, timed=(*plan.timed[:1], replace(plan.timed[1], policy=FixedSlope(34)))),
    ]
    for other in others:
        with pytest.raises(
            SharpDraftError, match="holds a run with other settings: give another --out"
        ):
            RunLog(path, other)
    assert path.read_bytes() == before
    assert RunLog(path, plan).rows == [{"session": "a"}]


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


# Runs


def without_times(rows: list[dict[str, Any]]) -> Any:
    """Rows as they lie on disk, but for what a clock said; masses to the digits that the order of
    additions leaves."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if not k.endswith("seconds")}
        if isinstance(value, list):
            return [strip(v) for v in value]
        return round(value, 4) if isinstance(value, float) else value

    return strip(json.loads(json.dumps(rows)))


LIVE = plan_of(
    "ar",
    "frozen",
    "sharpdraft",
    "window@40",
    replayed=("frozen", "sharpdraft", "fixed@1.3"),
    masses_every=4,
)
TASK = Task("t", ("",) * 5, answer_tokens=16)
PROMPTS = [
    [5, 9, 40],
    [33, 2],
    [18],
    [61, 61, 7, 30],
    [44],
]  # More than arms: each comes first once, AR twice.


def live(
    tiny: Tiny, done: list[dict[str, Any]], **options: Any
) -> tuple[Session, list[dict[str, Any]]]:
    """Run all turns that are not done yet."""
    session = Session(tiny.target, make_drafter(tiny.target), **options)
    rows = list(done)
    run_live(session, TASK, iter(PROMPTS), LIVE, (VOCAB - 1,), rows, rows.append)
    return session, rows


@pytest.fixture(scope="module")
def whole(llama: Tiny) -> tuple[Session, list[dict[str, Any]]]:
    return live(llama, [])


def test_live_run_is_the_targets_conversation(
    llama: Tiny, whole: tuple[Session, list[dict[str, Any]]]
) -> None:
    session, rows = whole
    said: list[int] = []
    assert [row["turn"] for row in rows] == [0, 1, 2, 3, 4]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        said += [VOCAB - 1] * bool(said) + prompt  # The end of turn that a cut answer lacks.
        answer = continuation(llama.model, said, 16)
        assert VOCAB - 1 not in answer
        assert (row["session"], row["context"], row["tokens"]) == ("t", len(said), answer)
        assert row["differences"] == {}
        assert list(row["arms"]) == ["ar", "frozen", "sharpdraft", "window@40"]
        for name, figures in row["arms"].items():
            assert figures["tokens"] == 16 and figures["seconds"] > 0
            written = [accepted + 1 for _, _, accepted in figures["rounds"]]
            assert (written == []) if name == "ar" else (0 < sum(written) <= 15)
        assert row["replayed"].keys() == {"frozen", "sharpdraft", "fixed@1.3"}
        for name in ("frozen", "sharpdraft"):
            assert row["replayed"][name]["rounds"] == row["arms"][name]["rounds"]
        contexts = [at for at, _ in row["replayed"]["frozen"]["mass"]]
        assert contexts == list(range(len(said), len(said) + 16 - BLOCK, 4))
        said += answer
    assert session.tokens == said
    last = {name: dict(figures["mass"]) for name, figures in rows[-1]["replayed"].items()}
    # Beyond the reference mass is concentrated; before it nothing is touched.
    assert all(last["sharpdraft"][at] > last["frozen"][at] for at in last["frozen"])
    first = rows[0]["replayed"]
    early = [
        (a, b)
        for (at, a), (_, b) in zip(
            first["frozen"]["mass"], first["sharpdraft"]["mass"], strict=True
        )
        if at < 20
    ]
    assert early and all(a == b for a, b in early)


def test_arms_take_turns_in_coming_first(llama: Tiny) -> None:
    session = Session(llama.target, make_drafter(llama.target))
    said: list[str] = []
    plan = plan_of("ar", "frozen", "fixed@1.2")
    run_live(session, TASK, iter(PROMPTS[:4]), plan, (), [], lambda row: None, said.append)
    names = [text.split()[0] for text in said]
    ar, frozen, fixed = "ar", "frozen", "fixed@1.2"
    assert names == [ar, frozen, fixed, frozen, fixed, ar, fixed, ar, frozen, ar, frozen, fixed]


def test_live_run_goes_on(llama: Tiny, whole: tuple[Session, list[dict[str, Any]]]) -> None:
    whole_session, whole_rows = whole
    for kept in (1, 4):
        session, rows = live(llama, whole_rows[:kept])
        assert without_times(rows) == without_times(whole_rows)
        assert session.tokens == whole_session.tokens


def test_live_run_ends_with_the_context(
    llama: Tiny, whole: tuple[Session, list[dict[str, Any]]]
) -> None:
    for capacity in (12, 29, 31, 40):  # Within answers and prompts, and at their ends.
        session, rows = live(llama, [], capacity=capacity)
        assert len(session.tokens) <= capacity
        for row, full in zip(rows, whole[1], strict=False):
            assert row["tokens"] == full["tokens"][: len(row["tokens"])]
        _, resumed = live(llama, rows, capacity=capacity)
        assert without_times(resumed) == without_times(rows)


def test_stop_token_inside_an_answer(llama: Tiny) -> None:
    """A turn that ends with a stop token needs none put behind it."""
    stop = continuation(llama.model, PROMPTS[0], 10)[-1]
    session = Session(llama.target, make_drafter(llama.target))
    rows: list[dict[str, Any]] = []
    run_live(session, TASK, iter(PROMPTS[:2]), LIVE, (stop,), [], rows.append)
    first, second = rows
    assert first["tokens"][-1] == stop and first["tokens"].index(stop) == len(first["tokens"]) - 1
    assert second["context"] == first["context"] + len(first["tokens"]) + len(PROMPTS[1])


def test_arm_that_differs_is_shown_with_its_gap(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verification gone wrong, planted: the row says where, and how far apart the target's two
    logits are."""
    session = Session(llama.target, make_drafter(llama.target))
    right = Session.generate

    def wrong(self: Session, *args: Any) -> Iterator[Any]:
        yield from right(self, *args)
        if self.drafting and self.policy is not None:
            self.tokens[-3] = (self.tokens[-3] + 1) % VOCAB

    monkeypatch.setattr(Session, "generate", wrong)
    rows: list[dict[str, Any]] = []
    run_live(
        session, TASK, iter(PROMPTS[:1]), plan_of("ar", "frozen", "sharpdraft"), (), [], rows.append
    )
    (row,) = rows
    answer = continuation(llama.model, PROMPTS[0], 16)
    assert row["tokens"] == answer
    ids = torch.tensor([PROMPTS[0] + answer[:13]])
    with torch.no_grad():
        logits = llama.model(ids).logits[0, -1]
    gap = float(logits[answer[13]] - logits[(answer[13] + 1) % VOCAB])
    assert row["differences"] == {"sharpdraft": {"at": 13, "gap": pytest.approx(gap, rel=1e-3)}}
    assert session.tokens == PROMPTS[0] + answer


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
    plan = plan_of(
        "ar", "frozen", "sharpdraft", replayed=("frozen",), edges=(90, 170, 250), turns_per_bucket=2
    )
    numbers = measured_turns(recording, plan, 250)
    assert numbers == [0, 1, 3]

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


# Figures


def row_of(
    session: str, turn: int, context: int, accepted: dict[str, list[int]], seconds: dict[str, float]
) -> Any:
    arms = {
        name: {
            "tokens": 40,
            "seconds": seconds[name],
            "rounds": [(context + i, 5, a) for i, a in enumerate(accepted.get(name, []))],
            "draft_seconds": 0.1,
            "verify_seconds": 0.1,
        }
        for name in seconds
    }
    replayed = {"sharpdraft": {**arms["sharpdraft"], "mass": [(context, 0.25 * (turn + 1))]}}
    return {
        "session": session,
        "turn": turn,
        "context": context,
        "tokens": [1] * 40,
        "arms": arms,
        "differences": {},
        "replayed": replayed,
    }


def rows_of(sessions: int) -> list[Any]:
    seconds = {"ar": 4.0, "frozen": 2.0, "sharpdraft": 1.0}
    rows = []
    for number in range(sessions):
        name = f"s{number}"
        rows.append(row_of(name, 0, 100, {"frozen": [0, 1], "sharpdraft": [1, number]}, seconds))
        rows.append(
            row_of(name, 1, 900, {"frozen": [0, 0, 0], "sharpdraft": [3]}, seconds | {"ar": 2.0})
        )
    return rows


def test_summary_of_known_rows() -> None:
    cells = {(c.bucket, c.arm): c for c in summarise(rows_of(4), EDGES)}
    assert list(cells) == [(b, a) for b in (0, 1) for a in ("ar", "frozen", "sharpdraft")]
    ar, frozen, sharp = (cells[0, name] for name in ("ar", "frozen", "sharpdraft"))
    assert (ar.turns, ar.tokens, ar.mal, ar.speedup, ar.gain, ar.mass) == (
        4,
        160,
        None,
        None,
        None,
        None,
    )
    assert ar.speed == Estimate(10.0, 10.0, 10.0)
    assert frozen.speed == Estimate(20.0, 20.0, 20.0) and frozen.speedup == Estimate(2.0, 2.0, 2.0)
    assert frozen.mal == Estimate(1.5, 1.5, 1.5) and frozen.gain is None
    assert sharp.speedup is not None and sharp.speedup.value == 4.0
    assert sharp.mal is not None and sharp.mal.value == pytest.approx(1 + (4 + 0 + 1 + 2 + 3) / 8)
    assert sharp.gain is not None and sharp.gain.value == pytest.approx(sharp.mal.value - 1.5)
    # Of the draws of four sessions from four, the middle 95 %: far from constant, and around the
    # value.
    assert sharp.mal.low is not None and sharp.mal.high is not None
    assert (
        1.5 < sharp.mal.low < sharp.mal.value - 0.2 < sharp.mal.value + 0.2 < sharp.mal.high < 3.0
    )
    later = cells[1, "sharpdraft"]
    assert later.mal == Estimate(4.0, 4.0, 4.0) and later.gain == Estimate(3.0, 3.0, 3.0)
    assert later.speedup == Estimate(2.0, 2.0, 2.0) and later.mass == Estimate(0.5, 0.5, 0.5)
    assert cells[0, "sharpdraft"].mass == Estimate(0.25, 0.25, 0.25)


def test_interval_is_the_percentiles_of_resampled_sessions() -> None:
    rows = [row_of(f"s{n}", 0, 50, {"sharpdraft": [n]}, {"sharpdraft": 1.0}) for n in range(30)]
    (cell,) = summarise(rows, (100,))
    assert cell.mal is not None and cell.mal.low is not None and cell.mal.high is not None
    error = 1.96 * np.std(np.arange(30)) / math.sqrt(30)
    assert cell.mal.value == pytest.approx(15.5)
    assert cell.mal.value - cell.mal.low == pytest.approx(error, rel=0.15)
    assert cell.mal.high - cell.mal.value == pytest.approx(error, rel=0.15)


def test_fewer_than_three_sessions_have_no_interval() -> None:
    for cell in summarise(rows_of(2), EDGES):
        for estimate in (cell.speed, cell.speedup, cell.mal, cell.gain, cell.mass):
            assert estimate is None or (estimate.low is None and estimate.high is None)
    assert str(Estimate(1.234)) == "1.23" and str(Estimate(1.234, 1.0, 2.0)) == "1.23 [1.00, 2.00]"


def test_summary_of_replayed_arms_and_of_what_lies_beyond() -> None:
    rows = rows_of(3)
    for row in rows:
        row["replayed"]["fixed@1.2"] = {"tokens": 40, "rounds": [(row["context"], 5, 2)]}
        row["replayed"]["frozen"] = {"tokens": 40, "rounds": [(row["context"], 5, 1)]}
    rows.append(row_of("s9", 0, 9000, {}, {"ar": 1.0, "sharpdraft": 1.0}))
    cells = {(c.bucket, c.arm): c for c in summarise(rows, EDGES)}
    assert {bucket for bucket, _ in cells} == {0, 1}
    fixed = cells[0, "fixed@1.2"]
    assert (fixed.speed, fixed.speedup) == (None, None)
    assert fixed.mal == Estimate(3.0, 3.0, 3.0) and fixed.gain == Estimate(1.0, 1.0, 1.0)
    assert [arm for bucket, arm in cells if bucket == 0] == [
        "ar",
        "frozen",
        "sharpdraft",
        "fixed@1.2",
    ]
    assert summarise([], EDGES) == []


def text_of(cells: list[Cell]) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(table(cells, EDGES, "a title"))
    return capture.get()


def test_table() -> None:
    text = text_of(summarise(rows_of(4), EDGES))
    for part in (
        "a title",
        "0-512",
        "512-1K",
        "frozen",
        "2.00 [2.00, 2.00]",
        "MAL - Frozen's",
        "top-32 mass",
    ):
        assert part in text
    assert text.count("0-512") == 1
    only_ar = [cell for cell in summarise(rows_of(2), EDGES) if cell.arm == "ar"]
    assert "MAL" not in text_of(only_ar) and "tokens/s" in text_of(only_ar)


def test_figure_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, count in enumerate((1, 4)):
        path = tmp_path / "new" / f"{number}.png"
        figure(summarise(rows_of(count), EDGES), EDGES, path, "a title")
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    rows = rows_of(1)
    for row in rows:
        row["arms"]["sharpdraft"][
            "rounds"
        ] = []  # Nothing drafted: not a number, which must not break a picture.
    figure(summarise(rows, EDGES), EDGES, tmp_path / "nan.png", "nothing drafted")


def test_prompt_text_is_that_of_the_targets(llama: Tiny) -> None:
    """The fixture's promise that the tests above rest on."""
    assert (
        continuation(llama.model, llama.text[: PROMPT + 9], 12)
        == llama.text[PROMPT + 9 : PROMPT + 21]
    )
