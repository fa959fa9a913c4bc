"""`bench` loses no context: long ones are shown, and what is not measured is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sharpdraft.decode.session import Session
from sharpdraft.errors import SharpDraftError
from sharpdraft.lab.plan import RunLog
from support.checkpoints import Checkpoints, save_checkpoints
from support.command import Result, Run, check_one_line, prompt_ids
from support.server import Handler, Odd, Serving
from support.tiny import POSITIONS

FULL = f"no room for an answer in the target's context of {POSITIONS} tokens"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """One layer with one head, so that long prompts are read soon."""
    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    small["max_position_embeddings"] = 65_536
    taps = {"target_layer_ids": [0], "mask_token_id": 3}
    drafter = {**small, "num_target_layers": 1, "dflash_config": taps}
    return save_checkpoints(tmp_path_factory.mktemp("long"), small, drafter)


class Bench:
    """The command with its usual options, and the rows that it wrote."""

    def __init__(self, run: Run, saved: Checkpoints, folder: Path) -> None:
        self.run, self.saved, self.folder = run, saved, folder

    def write(self, lengths: Sequence[int]) -> None:
        """A prompt a line, of so many words."""
        lines = (" ".join([f"w{9 + i}"] * n) + "\n" for i, n in enumerate(lengths))
        (self.folder / "prompts.txt").write_text("".join(lines))

    def __call__(self, *options: object) -> Result:
        line = ("bench", "--target", self.saved.target, "--drafter", self.saved.drafter)
        rest = ("--answer-tokens", 8, "--prompts", self.folder / "prompts.txt")
        return self.run(*line, *rest, "--out", self.folder / "out", *options)

    @property
    def rows(self) -> list[dict[str, Any]]:
        lines = (self.folder / "out" / "rows.jsonl").read_text().splitlines()[1:]
        return [json.loads(line) for line in lines]


@pytest.fixture
def bench(run: Run, saved: Checkpoints, tmp_path: Path) -> Bench:
    return Bench(run, saved, tmp_path)


def figures(result: Result) -> Any:
    """What --json printed, which has no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(result.out, parse_constant=refuse)


def test_no_context_is_lost(run: Run, long: Checkpoints, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench = Bench(run, long, tmp_path)
    bench.write([200, 700, 9_000, 17_000, 40_000])
    result = bench("--arms", "ar,frozen")
    assert (result.code, result.err) == (0, "")
    labels = ["0-512", "512-1K", "8K-16K", "16K-32K", "32K-64K"]
    found = [line.split()[0] for line in result.out.splitlines() if " ar " in line]
    assert [name for name in found if name in labels] == labels
    assert "All 40 tokens of the other arms are those that ar wrote, in 5 turns." in result.out
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    said = figures(bench("--arms", "ar,frozen", "--json"))
    assert [(cell["context"], cell["turns"]) for cell in said["cells"][::2]] == [
        (name, 1) for name in labels
    ]
    assert said["skipped"] == said["undrafted"] == []
    assert all(cell["mal"]["value"] >= 1 for cell in said["cells"][1::2])


def test_a_prompt_that_does_not_fit_among_good_ones(bench: Bench) -> None:
    bench.write([2, 300, 1])
    result = bench()
    length = len(prompt_ids(bench.saved, "w10 " * 300))
    assert result.code == 3
    assert result.err == f"note: skipped 1 turn, {FULL}: line-2 ({length} tokens)\n"
    assert "that ar wrote, in 2 turns; 1 turn skipped." in result.out
    first = bench.rows
    assert [row["session"] for row in first] == ["line-1", "line-2", "line-3"]
    again = bench("--json")
    assert again.code == 3 and again.err == result.err
    said = figures(again)
    assert [cell["turns"] for cell in said["cells"]] == [2, 2, 2]
    assert said["skipped"] == [
        {"session": "line-2", "turn": 0, "context": length, "kind": FULL}
        | {"reason": f"{length} tokens"}
    ]
    rows = {row["session"]: row for row in bench.rows}
    assert len(bench.rows) == 3 and rows == {row["session"]: row for row in first}


def test_a_conversation_goes_on_with_no_turn_left_out(bench: Bench) -> None:
    turns = ["w9", "w10 " * 300, "w11", "w12"]
    lines = [{"name": "chat", "turns": turns}, {"name": "b", "prompt": "w30"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (bench.folder / "prompts.txt").write_text(text)
    result = bench("--arms", "ar")
    assert result.code == 3
    notes = result.err.splitlines()
    assert len(notes) == 2 and notes[0].startswith(f"note: skipped 1 turn, {FULL}: chat, turn 1 (")
    assert notes[1] == (
        "note: skipped 2 turns, behind a turn that was skipped: chat, turn 2; chat, turn 3"
    )
    assert [row["turn"] for row in bench.rows if "skipped" not in row] == [0, 0]
    assert "in 2 turns: no arm to compare it with; 3 turns skipped." in result.out


def test_a_prompt_that_fails_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write([2, 9, 1])
    prefill = Session.prefill

    def failing(self: Session, prompt: Sequence[int]) -> int:
        if len(prompt) > 12:
            raise RuntimeError("can't allocate\nmemory")
        return prefill(self, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "prefill", failing)
        result = bench()
    assert result.code == 3 and result.err == (
        "note: skipped 1 turn, failed: line-2 (RuntimeError: can't allocate memory)\n"
    )
    first = {row["session"]: row for row in bench.rows}
    again = bench()
    assert (again.code, again.err) == (0, "") and "in 3 turns." in again.out
    rows = {row["session"]: row for row in bench.rows}
    assert len(bench.rows) == 3 and rows["line-2"]["differences"] == {}
    assert all(rows[name] == first[name] for name in ("line-1", "line-3"))


def test_only_turns_may_fail(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full ends the run, and so do prompts that all fail."""

    def full(log: RunLog, row: dict[str, Any]) -> None:
        raise SharpDraftError("cannot write: make room")

    bench.write([2, 1])
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "add", full)
        check_one_line(bench(), "cannot write: make room")
    bench.write([300] * 7)
    result = bench("--out", "none")
    check_one_line(result, f"nothing was measured: 7 turns, {FULL}: line-1 (", " and 2 more")


def test_a_replay_of_a_single_arm_compares_nothing(bench: Bench) -> None:
    bench.write([2, 1])
    result = bench("--arms", "ar", "--replay", "frozen,sharpdraft")
    assert result.code == 0 and "other arms" not in result.out
    assert (
        "ar alone was timed, 16 tokens in 2 turns: no arm to compare it with; what was replayed "
        "(2) follows this text." in result.out
    )


def test_rounds_without_drafts_are_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that stops where its positions end."""
    drafts = Session.num_drafts.fget
    assert drafts is not None
    near = property(lambda self: 0 if len(self.tokens) > 40 else drafts(self))
    monkeypatch.setattr(Session, "num_drafts", near)
    bench.write([2, 60])
    result = bench("--json", "--arms", "ar,frozen", "--replay", "sharpdraft", "--mass-every", 2)
    said = figures(result)
    context = len(prompt_ids(bench.saved, "w10 " * 60))
    assert result.code == 0
    assert [(each["arm"], each["turns"], each["context"]) for each in said["undrafted"]] == [
        (arm, 1, context) for arm in ("frozen", "sharpdraft")
    ]
    assert f"note: frozen drafted nothing behind {context} tokens: 7 rounds" in result.err
    assert "in 1 of 2 answers" in result.err
    bench.write([60])
    result = bench("--arms", "ar,frozen", "--out", "none")
    assert "nan" not in result.out and "MAL" not in result.out.partition("Text: ")[0]
    shown = figures(bench("--arms", "ar,frozen", "--out", "none", "--json"))
    assert [cell["mal"] for cell in shown["cells"]] == [None, None]


def test_lines_in_a_pipe_never_wrap(bench: Bench) -> None:
    names = ("first", "second", "the-third-of-them")
    for name in names:
        shutil.copytree(bench.saved.drafter, bench.folder / name)
    bench.write([2, 9, 1])
    arms = ("frozen", "sharpdraft", "window@40+sharpdraft@64")
    result = bench(
        *("--drafter", ",".join(str(bench.folder / name) for name in names)),
        *("--arms", f"ar,{','.join(arms)}", "--replay", "sharpdraft,fixed@1.2"),
        *("--mass-every", 2, "--out", bench.folder / ("long-name-" * 20)),
    )
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    every = [f"{name}:{arm}" for name in names for arm in (*arms, "fixed@1.2")]
    for arm in every:
        (line,) = (line for line in lines if f" {arm} " in line)
        # Values with both ends of their intervals: MAL and, unless it is the measure, the gain.
        assert line.count("[") >= 1 + (not arm.endswith(":frozen")) and line.count("[") == (
            line.count("]")
        )
    head = next(line for line in lines if "context" in line)
    for heading in ("tokens/s", "x AR", "MAL - Frozen's", "top-32 mass"):
        assert heading in head
    assert len(lines) == 1 + 2 + 1 + len(every) + 3
    assert lines[-1] == f"figure: {bench.folder / ('long-name-' * 20) / 'figure.png'}"


def test_a_server_loses_nothing_unsaid(bench: Bench, server: tuple[str, type[Handler]]) -> None:
    """It refuses prompts of more than 100 tokens; the target has no room for one of 300."""
    bench.write([2, 120, 300, 1])
    options = ("--base-url", f"ar={server[0]},frozen={server[0]}", "--concurrency", 4)
    line = ("bench", "--target", bench.saved.target, "--prompts", bench.folder / "prompts.txt")
    result = bench.run(*line, *options, "--out", bench.folder / "out", "--json")
    said = figures(result)
    assert result.code == 3
    assert {each["session"]: each["kind"] for each in said["skipped"]} == {
        "line-2": "failed",
        "line-3": FULL,
    }
    assert "note: skipped 1 turn, failed: line-2 (ar: http" in result.err
    assert "too long" in result.err and "line-3 (305 tokens)" in result.err
    assert [cell["turns"] for cell in said["cells"]] == [2, 2]


def test_a_server_without_metrics_has_no_mal(bench: Bench, serving: Serving) -> None:
    bench.write([2])
    line = ("bench", "--target", bench.saved.target, "--prompts", bench.folder / "prompts.txt")
    options = ("--base-url", f"frozen={serving(Odd)}", "--out", bench.folder / "out")
    result = bench.run(*line, *options)
    assert result.code == 0 and "nan" not in result.out and "MAL" not in result.out
    (cell,) = figures(bench.run(*line, *options, "--json"))["cells"]
    assert cell["mal"] is None and cell["speed"]["value"] > 0
