"""`bench --workload` from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sharpdraft.errors import SharpDraftError
from sharpdraft.workloads import registry, tasks
from sharpdraft.workloads.tasks import Recording, Task, Turn
from sharpdraft.workloads.workload import Reader, Workload
from support.checkpoints import Checkpoints
from support.command import Result, Run, check_one_line
from support.server import Handler
from support.tiny import VOCAB, continuation


def bench(run: Run, saved: Checkpoints, *options: object) -> Result:
    return run("bench", "--target", saved.target, "--drafter", saved.drafter, *options)


def tiny_workload(name: str, temperature: float = 0.0, *turns: str) -> Workload:
    def sessions(reader: Reader) -> list[Task]:
        read = "w20 w21 w22 w23 w24 w25 w26 w27\n"
        return [
            Task(each, (read + "w17", *turns), 10, lead=len(read))
            for each in ("one", "two", "three")[: reader.sessions]
        ]

    return Workload(name, f"what {name} is", f"books on {name}", "free", sessions, temperature)


def missing(name: str) -> Workload:
    def sessions(reader: Reader) -> list[Task]:
        raise SharpDraftError(f"{name}: not installed here; apt-get install {name}")

    return Workload(name, "nothing", "nowhere", "none", sessions)


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [
        tiny_workload("calm", 0.0, "w30 w31"),
        tiny_workload("terse"),
        tiny_workload("hot", 1.5),
        missing("gone"),
    ]
    monkeypatch.setattr(registry, "WORKLOADS", {each.name: each for each in ours})


@pytest.mark.usefixtures("workloads")
def test_bench_of_workloads(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    named = ("--workload", "calm,gone,terse", "--out", tmp_path / "out")
    result = bench(run, saved, *named, "--replay", "frozen")
    assert result.code == 0
    assert result.err == (
        "note: gone: not installed here; apt-get install gone; the other workloads are measured\n"
    )
    lines = result.out.splitlines()
    assert lines[0].endswith(", calm, terse")
    assert "workload" in lines[1] and "MAL, new" in lines[1]
    said = [line for line in lines if line.startswith("Text of ")]
    assert [line.split(":")[0] for line in said] == ["Text of calm", "Text of terse"]
    assert all("Lookup without a model: MAL " in line for line in said)
    header, *rows = map(json.loads, (tmp_path / "out" / "rows.jsonl").read_text().splitlines())
    assert header["plan"]["workloads"] == ["calm", "terse"]
    sessions = [(row["workload"], row["session"], row["turn"]) for row in rows]
    assert sessions == [
        *(("calm", f"calm/{name}", turn) for name in ("one", "two", "three") for turn in (0, 1)),
        *(("terse", f"terse/{name}", 0) for name in ("one", "two", "three")),
    ]
    prompt = [1, 4, *range(20, 28), 17, 2, 1, 5]
    for row in rows:
        if row["turn"] == 0:
            assert row["context"] == len(prompt)
            assert row["tokens"] == continuation(saved.model, prompt, 10)
    again = json.loads(bench(run, saved, *named, "--replay", "frozen", "--json").out)
    assert [each["workload"] for each in again["repetition"]] == ["calm", "terse"]
    assert again["repetition"][1]["positions"] == 3 * 9 and again["repetition"][1]["mal"] >= 1
    assert {cell["workload"] for cell in again["cells"]} == {"calm", "terse"}
    check_one_line(bench(run, saved, *named[:1], "calm", *named[2:]), "other settings")
    few = bench(run, saved, "--workload", "terse", "--sessions", 2, "--json", "--arms", "ar")
    assert [cell["turns"] for cell in json.loads(few.out)["cells"]] == [2]


@pytest.mark.usefixtures("workloads")
def test_bench_of_a_sampled_workload(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    result = bench(run, saved, "--workload", "hot", "--out", tmp_path / "hot")
    assert result.code == 0 and "hot, at temperature 1.5" in result.out.splitlines()[0]
    assert "Answers are sampled" in result.out
    header = json.loads((tmp_path / "hot" / "rows.jsonl").read_text().splitlines()[0])
    assert header["plan"]["sampling"]["temperature"] == 1.5
    both = ("--workload", "hot,terse")
    check_one_line(bench(run, saved, *both), "hot is measured on sampled answers, the others on")
    assert bench(run, saved, *both, "--temperature", 1, "--sessions", 1).code == 0
    replayed = bench(run, saved, "--workload", "hot", "--replay", "frozen", "--out", tmp_path / "r")
    assert replayed.code == 0, replayed.err


@pytest.mark.usefixtures("workloads")
def test_bench_refuses_what_is_no_workload(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    for named, said in (
        ("cold", "workload 'cold': known are calm, terse, hot, gone"),
        ("calm,calm", "workload 'calm' is named twice"),
        (" ,", "no workload is named"),
        ("gone", "gone: not installed here; apt-get install gone"),
    ):
        check_one_line(bench(run, saved, "--workload", named), said)
    check_one_line(
        bench(run, saved, "--workload", "calm", "--prompts", tmp_path / "p.txt"),
        "give --workload or --prompts, not both",
    )


@pytest.mark.usefixtures("workloads")
def test_bench_lists_workloads(run: Run) -> None:
    said = run("bench", "--workload", "list")
    assert said.code == 0 and said.err == ""
    for part in ("terse: what terse is\n  from books on terse\n  licence: free\n", "held out"):
        assert part in said.out
    listed = json.loads(run("bench", "--workload", "list", "--json").out)
    assert [each["name"] for each in listed] == ["calm", "terse", "hot", "gone"]
    assert listed[2]["temperature"] == 1.5


@pytest.mark.usefixtures("workloads")
def test_recorded_workloads_are_read(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tiny target in the place of the built-in one."""
    words = torch.randint(6, VOCAB, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    one = Recording("one", tuple(words), (Turn(30, 40, 80),))

    def recorded(workload: str = "greedy") -> list[Recording]:
        return [one] if workload in ("calm", "gone") else []

    monkeypatch.setattr(tasks, "recordings", recorded)
    monkeypatch.setattr("sharpdraft.cli.work.SMOLLM2", str(saved.target))
    out = tmp_path / "out"
    result = bench(run, saved, "--workload", "calm,terse,gone", "--arms", "ar", "--out", out)
    assert (result.code, result.err) == (0, ""), "what is recorded needs no source"
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()[1:]]
    assert [row["session"] for row in rows] == [
        *("calm/one", "terse/one", "terse/two", "terse/three", "gone/one")
    ]
    assert rows[0]["tokens"] == continuation(saved.model, words[:40], 40)
    check_one_line(
        bench(run, saved, "--workload", "calm", "--system", "be kind"), "the recorded sessions"
    )


@pytest.mark.usefixtures("workloads")
def test_workloads_are_asked_of_servers(
    run: Run,
    saved: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: tuple[str, type[Handler]],
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    words = torch.randint(6, VOCAB, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    one = Recording("one", tuple(words), (Turn(30, 40, 80),))
    ours = {"calm": [one]}
    monkeypatch.setattr(tasks, "recordings", lambda workload="greedy": ours.get(workload, []))
    monkeypatch.setattr("sharpdraft.cli.work.SMOLLM2", str(saved.target))

    def asked(named: str, *options: object) -> Result:
        servers = ("--base-url", f"frozen={server[0]}", "--out", tmp_path / "out", *options)
        return run("bench", "--target", saved.target, "--workload", named, *servers)

    result = asked("terse,calm", "--concurrency", 8)
    assert result.code == 0 and result.out.splitlines()[0].endswith("at once, terse, calm")
    header, *rows = map(json.loads, (tmp_path / "out" / "rows.jsonl").read_text().splitlines())
    assert header["plan"]["workloads"] == ["terse", "calm"]
    assert [(row["workload"], row["requests"], row["session"]) for row in rows] == [
        ("terse", 3, "terse/one+terse/two+terse/three"),
        ("calm", 1, "calm/one-0"),
    ]
    assert {tuple(body["prompt"]) for body in server[1].asked} >= {tuple(words[:40])}
    check_one_line(asked("calm", "--chat"), "calm: recorded sessions are token ids")
    check_one_line(asked("hot"), "--workload hot: sampled answers are for the lab's own loop")
    ours.clear()
    check_one_line(asked("calm"), "an engine is given single prompts: calm/one has several turns")
