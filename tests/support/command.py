"""The command line in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sharpdraft.cli.main import main
from support.checkpoints import Checkpoints


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Run:
    """The command line in this process: exit code, stdout, stderr."""

    def call(*args: object, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["sharpdraft", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code or 0
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return call


def check_one_line(result: Result, *parts: str) -> None:
    assert result.code == 1
    assert result.out == ""
    assert (
        result.err.startswith("error: ")
        and result.err.count("\n") == 1
        and result.err.endswith("\n")
    )
    for part in parts:
        assert part in result.err


def prompt_ids(saved: Checkpoints, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    rendered = saved.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, tokenize=False
    )
    return list(saved.tokenizer(rendered, add_special_tokens=False)["input_ids"])
