"""`bench` in engines from outside: what is refused before one is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from support.checkpoints import Checkpoints
from support.command import Run, check_one_line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--arms", "ar,froze"), "arm 'froze': unknown"),
        (("--arms", "ar,sinks@4+window@64"), "arm 'sinks@4+window@64': view (sinks@4+window@64)"),
        (("--arms", "ar,sinks@4+window@64"), "vLLM's attention backends cannot keep the first"),
        (("--arms", "ar,window@4"), "its own block of 6"),
        (("--arms", "window@64", "--drafts", 64), "its own block of 65"),
        (("--engine-args", "[]"), "--engine-args is no JSON object"),
        (("--temperature", 1), "--temperature is for the lab's own loop"),
        (("--replay", "frozen"), "--replay is for the lab's own loop"),
        (("--mass-every", 4), "--mass-every is for the lab's own loop"),
        (("--device", "cpu"), "--device is for the lab's own loop"),
    ],
)
def test_what_vllm_cannot_do_is_refused(
    run: Run, saved: Checkpoints, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    (tmp_path / "prompts.txt").write_text("w9\n")
    line = ("bench", "--engine", "vllm", "--target", saved.target, "--drafter", saved.drafter)
    check_one_line(run(*line, "--prompts", tmp_path / "prompts.txt", *options), message)
    assert not (tmp_path / "sharpdraft-bench").exists()


def test_what_an_engine_is_given(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"name": "long", "turns": ["w9", "w10"]}\n')
    line = ("bench", "--engine", "vllm", "--target", saved.target)
    check_one_line(run(*line), f"no drafter comes with {saved.target}")
    both = (*line, "--drafter", saved.drafter)
    check_one_line(run(*both), "recorded sessions are those of", "give --prompts")
    check_one_line(run(*both, "--prompts", tmp_path / "prompts.jsonl"), "long has several turns")


@pytest.mark.parametrize("arm", ["window@64+sharpdraft+drafts@3", "slopes@40:4/6"])
def test_an_arm_that_vllm_can_do_starts_it(
    run: Run, saved: Checkpoints, tmp_path: Path, arm: str
) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    (tmp_path / "prompts.txt").write_text("w9\n")
    line = ("bench", "--engine", "vllm", "--target", saved.target, "--drafter", saved.drafter)
    result = run(*line, "--prompts", tmp_path / "prompts.txt", "--arms", arm)
    check_one_line(result, "install vllm", f"vllm-{arm.replace('/', '-')}.log")
