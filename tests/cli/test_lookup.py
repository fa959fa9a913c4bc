"""`--drafter lookup` and `--drafter DRAFTER+lookup` from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharpdraft.drafters.lookup import DRAFTS, SHORTEST
from sharpdraft.drafters.suffixes import LONGEST
from sharpdraft.lab.arms import arms_of
from sharpdraft.lab.backends.vllm import Engine, drafts_of, speculative_config
from sharpdraft.method.settings import DraftSettings
from support.checkpoints import Checkpoints
from support.command import Run, check_one_line

PROMPT = "w9 w10 w11 w12 " * 6


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()[1:]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"name": "a", "turns": ["w9 w10 w9 w10 w9", "w10 w11"]}\n{"prompt": "w30"}\n')
    return path


def test_generate(run: Run, saved: Checkpoints) -> None:
    """Lookup needs no directory and no arm; all write what the target writes."""
    common = ("generate", PROMPT, "--target", saved.target, "--max-new-tokens", 40, "--json")
    alone = json.loads(run(*common, "--arm", "ar").out)
    for drafter, arm, asked in (
        ("lookup", "frozen", ()),
        ("lookup", "drafts@3", ("--arm", "drafts@3")),
        (f"{saved.drafter}+lookup", "sharpdraft", ()),
        (f"{saved.drafter}+lookup", "frozen", ("--arm", "frozen", "--drafts", "4")),
    ):
        shown = run(*common, "--drafter", drafter, *asked)
        assert shown.code == 0, shown.err
        figures = json.loads(shown.out)
        assert figures["arm"] == arm and figures["token_ids"] == alone["token_ids"]
        assert figures["mal"] > 1


def test_bench(run: Run, saved: Checkpoints, prompts: Path, tmp_path: Path) -> None:
    common = ("bench", "--target", saved.target, "--prompts", prompts, "--answer-tokens", 25)
    shown = run(*common, "--drafter", "lookup", "--replay", "frozen", "--json", "--out", tmp_path)
    assert shown.code == 0, shown.err
    told = json.loads(shown.out)
    assert [cell["arm"] for cell in told["cells"]] == ["ar", "frozen"]
    assert told["differences"] == []
    for row in rows_of(tmp_path):
        arm = row["arms"]["frozen"]
        # A round without a match is one of the drafter's, and counts.
        assert len(arm["rounds"]) + sum(r[2] for r in arm["rounds"]) in (
            arm["tokens"] - 1,
            arm["tokens"] - 2,
        )
        assert any(r[1] == 0 for r in arm["rounds"])
        assert row["replayed"]["frozen"]["rounds"] == arm["rounds"]


def test_bench_of_several(run: Run, saved: Checkpoints, prompts: Path, tmp_path: Path) -> None:
    """Lookup beside others has the arms that it can do, which is said."""
    own, both = saved.drafter.name, f"{saved.drafter.name}+lookup"
    common = ("bench", "--target", saved.target, "--prompts", prompts, "--answer-tokens", 25)
    asked = f"{saved.drafter},lookup,{saved.drafter}+lookup"
    shown = run(*common, "--drafter", asked, "--json", "--out", tmp_path)
    assert shown.code == 0, shown.err
    assert "not measured, as lookup has no attention: lookup:sharpdraft" in shown.err
    told = json.loads(shown.out)
    assert [cell["arm"] for cell in told["cells"]] == [
        "ar",
        *(f"{own}:{arm}" for arm in ("frozen", "sharpdraft")),
        "lookup:frozen",
        *(f"{both}:{arm}" for arm in ("frozen", "sharpdraft")),
    ]
    assert told["differences"] == []


def test_what_lookup_cannot_do_is_refused(run: Run, saved: Checkpoints, prompts: Path) -> None:
    common = ("generate", "w9", "--target", saved.target)
    for arm, said in (
        ("sharpdraft", "arm 'sharpdraft': scale ("),
        ("fixed@1.3", "arm 'fixed@1.3': scale (fixed@1.3): the drafter looks text up"),
        ("window@64", "arm 'window@64': view (window@64)"),
    ):
        told = run(*common, "--drafter", "lookup", "--arm", arm)
        check_one_line(told, said, "no attention", "use frozen")
    check_one_line(run(*common, "--drafter", "+lookup"), "name the drafter, as dflash+lookup")
    check_one_line(run(*common, "--drafter", "/no/where+lookup"), "'/no/where' does not exist")
    check_one_line(
        run(*common, "--drafter", "lookup", "--family", "pard"), "lookup is of no family"
    )
    check_one_line(run(*common), "--drafter lookup needs none")
    check_one_line(
        run(*common, "--drafter", "lookup", "--drafts", 40), "40 drafts", "drafts 1 to 32"
    )
    check_one_line(
        run("bench", "--target", saved.target, "--prompts", prompts, "--drafter", "lookup,lookup"),
        "their names must differ",
    )
    engine = ("bench", "--target", saved.target, "--prompts", prompts, "--engine", "vllm")
    check_one_line(
        run(*engine, "--drafter", f"{saved.drafter}+lookup"), "vLLM has no lookup beside a drafter"
    )


def test_a_directory_of_that_name_is_not_meant(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lookup").symlink_to(saved.drafter)
    common = ("generate", PROMPT, "--target", saved.target, "--max-new-tokens", 4, "--json")
    shown = run(*common, "--drafter", "lookup")
    assert shown.code == 0 and "for the directory say ./lookup" in shown.err
    assert run(*common, "--drafter", "./lookup", "--arm", "window@32").code == 0


def test_what_vllm_is_told(tmp_path: Path) -> None:
    """Its own lookup, with our lengths; nothing for the plugin to do."""
    frozen, short = arms_of(["frozen", "drafts@3"], {"": DraftSettings()})
    assert [drafts_of(arm, None) for arm in (frozen, short)] == [DRAFTS, 3]
    assert speculative_config(None, 3) == {
        "method": "ngram",
        "prompt_lookup_min": SHORTEST,
        "prompt_lookup_max": LONGEST,
        "num_speculative_tokens": 3,
    }
    child = tmp_path / "python"
    kept = f"read job; echo \"$job\" > '{tmp_path}/job'"
    child.write_text(f"#!/bin/sh\n{kept}; echo '{{}}'; read x\n")
    child.chmod(0o755)
    Engine.of(short, tmp_path, None, python=str(child)).close()
    job = json.loads((tmp_path / "job").read_text())
    assert job["drafter"] is None and job["asked"] is None
    assert job["options"] == {"speculative_config": speculative_config(None, 3)}
