"""The script that asks transformers about a run's tokens."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from sharpdraft.workloads import registry
from sharpdraft.workloads.tasks import Task
from sharpdraft.workloads.workload import Workload
from support.checkpoints import Checkpoints
from support.command import Run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "check_lossless.py"


def check(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[str, object]:
    """What it says on stdout, and what it exits with."""
    code: object = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), *map(str, options)])
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as exit_:
            code = exit_.code
    return capsys.readouterr().out, code


def test_a_run_of_ones_own_prompts(
    run: Run, saved: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, other = tmp_path / "prompts.jsonl", tmp_path / "other.txt"
    chat = {"name": "chat", "turns": ["w9", "w10 w11", "w10 " * 300]}
    prompts.write_text(json.dumps(chat) + '\n{"name": "b", "prompt": "w30"}\n')
    other.write_text("w9\n")
    line = ("bench", "--target", saved.target, "--drafter", saved.drafter, "--prompts", prompts)
    assert run(*line, "--arms", "ar,frozen", "--answer-tokens", 12).code == 3
    rows = tmp_path / "sharpdraft-bench" / "rows.jsonl"
    said, code = check(capsys, rows, "--prompts", prompts, "--generate", 5)
    assert code == 0 and "36 tokens against transformers' forward, 15 against" in said
    assert "Differences from transformers: 0" in said
    for options, message in (((), "is of a prompt file"), (("--prompts", other), "not in that")):
        said, error = check(capsys, rows, *options)
        assert said == "" and str(error).startswith("error: session ") and message in str(error)
        assert "--prompts FILE" in str(error) and "\n" not in str(error)
    prompts.write_text(prompts.read_text().replace("w10 w11", "w10"))
    assert "the run's had" in str(check(capsys, rows, "--prompts", prompts)[1])
    prompts.write_text(prompts.read_text().replace('"w10"', '"w10 w11"'))
    # A wrong token, planted.
    header, first, *rest = rows.read_text().splitlines()
    row = json.loads(first)
    row["tokens"][-1] = (row["tokens"][-1] + 1) % 60
    rows.write_text("\n".join([header, json.dumps(row), *rest]) + "\n")
    assert "chat, turn 0, token 11: logits" in check(capsys, rows, "--prompts", prompts)[0]


def test_a_run_of_workloads(
    run: Run,
    saved: Checkpoints,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Workload(
        "own", "", "", "", lambda reader: [Task("one", ("w20 w21\nw17", "w9"), 8, lead=8)]
    )
    monkeypatch.setattr(registry, "WORKLOADS", {"own": own})
    line = ("bench", "--target", saved.target, "--drafter", saved.drafter, "--workload", "own")
    assert run(*line, "--arms", "ar,frozen").code == 0
    said, code = check(capsys, tmp_path / "sharpdraft-bench" / "rows.jsonl")
    assert code == 0 and "Differences from transformers: 0" in said
