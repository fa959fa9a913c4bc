"""The commands from outside: help, and wrong usage."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from sharpdraft.cli.options import ARM_WORDS
from sharpdraft.method.settings import known_words
from support.command import Run

COMMANDS = [
    "generate",
    "demo",
    "bench",
    "train",
    "train dflash",
    "train eagle3",
    "train pard",
    "doctor",
    "record",
]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(run: Run, command: str) -> None:
    result = run(*command.split(), "--help")
    assert (result.code, result.err) == (0, "")
    assert "Usage: " in result.out and f" {command} [OPTIONS]".replace("  ", " ") in result.out


@pytest.mark.parametrize("line", ["--help", "generate --help", "bench --help", "bench --nonsense"])
def test_usage_comes_at_once(line: str) -> None:
    """In a process of its own, in which nothing heavy is imported."""
    code = (
        "import sys\n"
        "from sharpdraft.cli.main import main\n"
        "try: main()\n"
        "finally: print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    command = [sys.executable, "-c", code, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if "nonsense" in line else 0)
    imported = ast.literal_eval(done.stdout.splitlines()[-1])
    assert "typer" in imported
    heavy = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub"}
    assert not heavy & set(imported)
    if line == "--help":
        assert all(command in done.stdout for command in COMMANDS if " " not in command)


def test_what_help_says_without_importing_it_is_so() -> None:
    known = {word.partition("@")[0] for word in known_words()}
    assert {word.partition("@")[0] for word in ARM_WORDS} == known | {"ar"}


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "generate hi --max-new-tokens 0",
        "generate hi --nonsense",
        "generate hi --drafts 0",
        "generate hi --reference 64",
        "bench --block 5",
        "bench --sessions 0",
        "bench --answer-tokens 1",
        "bench --mass-every -1",
        "train dflash",
        "train dflash --out x --context 10",
        "record",
        "record --out x --length five",
    ],
)
def test_wrong_usage(run: Run, line: str) -> None:
    result = run(*line.split())
    assert (result.code, result.out) == (2, "")
    assert "Usage: " in result.err and "Traceback" not in result.err
