"""`bench` and `demo` from outside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpdraft.hub import checkpoints
from sharpdraft.lab.plan import RunLog
from sharpdraft.workloads import tasks
from sharpdraft.workloads.tasks import Recording, Turn
from support.checkpoints import Checkpoints
from support.command import Result, Run, check_one_line
from support.tiny import POSITIONS, VOCAB, continuation


def test_bench_says_what_is_wrong(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    check_one_line(
        run("bench", "--engine", "vllm", "--weights", "bfloat16"),
        "--weights is for the lab's own loop",
    )
    both = ("--target", saved.target, "--drafter", saved.drafter)
    good, bad, none = (tmp_path / name for name in ("good.txt", "bad.jsonl", "none.txt"))
    good.write_text("w9 w10\n")
    bad.write_text('{"prompt": "w9"}\n{"prompt": 3}\n')
    prompts = ("--prompts", good)
    check_one_line(run("bench", *both, "--prompts", none), f"cannot read the prompt file {none}")
    check_one_line(run("bench", *both, "--prompts", bad), f'{bad}, line 2: "prompt" is 3')
    check_one_line(run("bench", *both, *prompts, "--arms", "ar,froze"), "arm 'froze': unknown")
    check_one_line(run("bench", *both, *prompts, "--arms", " ,"), "--arms names no arm")
    check_one_line(
        run("bench", *both, *prompts, "--replay", "ar"), "--replay takes drafting arms only"
    )
    check_one_line(
        run("bench", *both, *prompts, "--arms", "ar,frozen,frozen"), "'frozen' is named twice"
    )
    check_one_line(
        run("bench", *both, *prompts, "--arms", "ar,window@3"), "window@3", "its own block of 6"
    )
    check_one_line(run("bench", *both, *prompts, "--drafts", 6), "length: 6 drafts", "1 to 5")
    check_one_line(
        run("bench", "--target", saved.target, *prompts), f"no drafter comes with {saved.target}"
    )
    check_one_line(run("bench", *both, *prompts, "--out", good), str(good))
    for options, message in (
        (("--mass-every", 2), "--mass-every is for replayed arms: name some with --replay"),
        (("--concurrency", 2), "--concurrency is for --engine and --base-url"),
        (("--engine-args", "[]"), "--engine-args is for --engine and --base-url"),
    ):
        check_one_line(run("bench", *both, *prompts, *options), message)
    good.write_text("w9 " * POSITIONS)
    check_one_line(
        run("bench", *both, *prompts),
        f"nothing was measured: 1 turn, no room for an answer in the target's context of "
        f"{POSITIONS} tokens: line-1 (",
    )


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}[INST] {{ m['content'] }} {% endfor %}"]
)
def test_bench_of_a_target_that_does_not_chat_like_this(
    run: Run, saved: Checkpoints, tmp_path: Path, template: str | None
) -> None:
    target = tmp_path / "target"
    shutil.copytree(saved.target, target)
    (target / "chat_template.jinja").unlink()
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["w9", "w10"]}\n')
    result = run(
        *("bench", "--target", target, "--drafter", saved.drafter),
        *("--prompts", tmp_path / "prompts.jsonl", "--answer-tokens", 8),
    )
    check_one_line(result, "chat template")


def bench(run: Run, saved: Checkpoints, *options: object) -> Result:
    return run(
        "bench",
        "--target",
        saved.target,
        "--drafter",
        saved.drafter,
        "--answer-tokens",
        12,
        *options,
    )


def test_bench_of_sampled_answers(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("w9 w10\nw30\n")

    def rows(seed: int, out: str) -> list[dict[str, Any]]:
        options = (
            "--prompts",
            tmp_path / "prompts.txt",
            "--temperature",
            1.5,
            "--seed",
            seed,
            "--out",
            tmp_path / out,
        )
        result = bench(run, saved, *options)
        assert result.code == 0 and "tokens of the other arms" not in result.out
        return [
            json.loads(line)
            for line in (tmp_path / out / "rows.jsonl").read_text().splitlines()[1:]
        ]

    first, again, other = rows(3, "first"), rows(3, "again"), rows(4, "other")
    assert (
        [row["tokens"] for row in first]
        == [row["tokens"] for row in again]
        != [row["tokens"] for row in other]
    )
    assert all(row["differences"] == {} and row["arms"]["frozen"]["rounds"] for row in first)


def test_a_replay_of_sampled_answers_is_expected(
    run: Run, saved: Checkpoints, tmp_path: Path
) -> None:
    """Rounds with weights, that write the first arm's text together."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"w{i} w9 w{i + 3}"}) + "\n" for i in range(4))
    )
    options = ("--prompts", prompts, "--temperature", 1, "--arms", "ar,frozen")
    result = bench(run, saved, *options, "--replay", "frozen,sharpdraft", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    rows = [
        json.loads(line)
        for line in (tmp_path / "sharpdraft-bench" / "rows.jsonl").read_text().splitlines()[1:]
    ]
    sums = {"rounds": 0.0, "accepted": 0.0}
    for row in rows:
        for arm in row["replayed"].values():
            written = sum(weight * (accepted + 1) for _, _, accepted, weight in arm["rounds"])
            # The first token is the prefill's, and a last one may be left to write by itself.
            assert -1.01 < written - (len(row["tokens"]) - 1) < 0.01
        for _, _, accepted, weight in row["replayed"]["sharpdraft"]["rounds"]:
            sums["rounds"] += weight
            sums["accepted"] += weight * accepted
    (cell,) = [cell for cell in found["cells"] if cell["arm"] == "sharpdraft"]
    assert cell["mal"]["value"] == pytest.approx(1 + sums["accepted"] / sums["rounds"])


def test_bench_of_prompts_and_its_resumption(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text(
        '{"name": "a", "turns": ["w9", "w10 w11"]}\n{"name": "b", "prompt": "w30"}\n'
    )
    options = (
        "--prompts",
        prompts,
        "--replay",
        "frozen,fixed@1.2",
        "--mass-every",
        3,
        "--out",
        out,
    )
    result = bench(run, saved, *options, "--json")
    assert result.code == 0, result.err
    said = json.loads(result.out)
    assert said["differences"] == []
    arms = [cell["arm"] for cell in said["cells"]]
    assert arms == ["ar", "frozen", "sharpdraft", "fixed@1.2"]
    assert [cell["turns"] for cell in said["cells"]] == [3] * 4
    assert said["cells"][1]["mal"]["value"] >= 1 and said["cells"][1]["speedup"]["value"] > 0
    assert said["figure"] == str(out / "figure.png") and (out / "figure.png").stat().st_size > 1000
    rows = (out / "rows.jsonl").read_text().splitlines()
    assert len(rows) == 4
    (out / "rows.jsonl").write_text("\n".join(rows[:3])[:-5])
    again = bench(run, saved, *options)
    assert again.code == 0
    assert again.err == "", "no bar where nobody watches"
    for part in (
        "tokens/s",
        "MAL",
        "top-32 mass",
        "sharpdraft",
        "tokens of the other arms are those that ar wrote",
    ):
        assert part in again.out
    resumed = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert resumed[1] == json.loads(rows[1]), "what was measured before the break is kept as it is"
    assert [(row["session"], row["turn"], row["tokens"]) for row in resumed[1:]] == [
        (row["session"], row["turn"], row["tokens"]) for row in map(json.loads, rows[1:])
    ]
    said_so_far: list[int] = []
    for row, prompt in zip(
        resumed[1:3], ([1, 4, 9, 2, 1, 5], [1, 4, 10, 11, 2, 1, 5]), strict=True
    ):
        if said_so_far and said_so_far[-1] != 2:
            said_so_far.append(2)  # An answer that was cut off gets the end of turn it lacks.
        said_so_far += prompt
        assert row["context"] == len(said_so_far)
        assert row["tokens"] == continuation(saved.model, said_so_far, 12)
        said_so_far += row["tokens"]


def test_bench_never_shows_rows_of_another_run(
    run: Run, saved: Checkpoints, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("w9\n")
    options = ("--prompts", prompts, "--out", out, "--arms", "ar,frozen", "--json")
    assert bench(run, saved, *options).code == 0
    check_one_line(
        bench(run, saved, *options, "--arms", "ar"),
        "holds a run with other settings: give another --out",
    )
    check_one_line(bench(run, saved, *options, "--arms", "ar,sharpdraft@64"), "other settings")
    check_one_line(bench(run, saved, *options, "--drafts", 2), "other settings")
    prompts.write_text("w10\n")
    check_one_line(bench(run, saved, *options), "other settings")
    prompts.write_text("w9\n")
    check_one_line(bench(run, saved, *options, "--answer-tokens", 13), "other settings")
    assert bench(run, saved, *options).code == 0


def test_interrupted_bench_says_how_to_go_on(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = RunLog.add

    def interrupted(log: RunLog, row: dict[str, Any]) -> None:
        add(log, row)
        raise KeyboardInterrupt

    (tmp_path / "prompts.txt").write_text("w9\nw10\n")
    options = ("--prompts", tmp_path / "prompts.txt", "--arms", "ar,frozen")
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "add", interrupted)
        result = bench(run, saved, *options)
    check_one_line(result, "stopped", "rows.jsonl is kept, and the same command goes on from there")
    assert bench(run, saved, *options).code == 0
    assert len((tmp_path / "sharpdraft-bench" / "rows.jsonl").read_text().splitlines()) == 3


def test_demo_and_bench_of_recorded_sessions(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tiny target in the place of the built-in one."""
    tokens = [
        int(t) for t in torch.randint(6, VOCAB, (200,), generator=torch.Generator().manual_seed(0))
    ]
    turns = tuple(Turn(start, start + 10, start + 50) for start in (0, 50, 100))
    sessions = [Recording(name, tuple(tokens), turns) for name in ("one", "two")]
    monkeypatch.setattr(tasks, "recordings", lambda: sessions)
    monkeypatch.setattr(checkpoints, "built_in_drafter", lambda *names: saved.drafter)
    for module in ("demo", "work"):
        monkeypatch.setattr(f"sharpdraft.cli.{module}.SMOLLM2", str(saved.target))
    demo = run("demo", "--out", tmp_path / "demo")
    assert demo.code == 0 and "Traceback" not in demo.err
    assert (
        "One session of" in demo.err
        and "at 110 tokens:" in demo.err
        and "(differs)" not in demo.err
    )
    assert "tokens of the other arms are those that ar wrote" in demo.out
    assert (tmp_path / "demo" / "figure.png").exists()
    benched = bench(
        run, saved, "--turns-per-bucket", 2, "--json", "--arms", "ar,frozen", "--sessions", 2
    )
    assert benched.err == "" and [cell["turns"] for cell in json.loads(benched.out)["cells"]] == [
        4,
        4,
    ]
