"""`generate` with a text or a template that would leave the target without a prompt."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from sharpdraft.cli.main import main
from support.checkpoints import Checkpoints
from support.command import Run, check_one_line


def test_a_prompt_that_is_no_utf_8(
    run: Run,
    saved: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = ("--target", saved.target, "--drafter", saved.drafter)
    for wrong in (("w7\udcff",), ("w7", "--system", "\udcff"), ("w7\udcff", "--raw")):
        check_one_line(run("generate", *wrong, *both), "is no UTF-8")
    check_one_line(run("generate", *both, stdin="w7\udcff w8"), "the prompt is no UTF-8")
    strict = io.TextIOWrapper(io.BytesIO(b"w7\xff w8"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["sharpdraft", "generate", *map(str, both)])
    monkeypatch.setattr(sys, "stdin", strict)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert "the prompt is no UTF-8" in capsys.readouterr().err


def test_the_users_text_is_in_the_prompt(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    target = shutil.copytree(saved.target, tmp_path / "target")
    both = ("--target", target, "--drafter", saved.drafter, "--max-new-tokens", 2, "--json")
    file = target / "chat_template.jinja"
    text = file.read_text()
    counts = []
    parts = "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}"
    for template in (text, text.replace("{{ m['content'] }}", parts)):
        file.write_text(template)
        counts.append(json.loads(run("generate", "w7 w9", *both).out)["prompt_tokens"])
    assert counts[0] == counts[1]
    file.write_text("w5")
    check_one_line(run("generate", "w7 w9", *both), "does not show the user's text")
