"""`generate` and the settings, the length and the family of a drafter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sharpdraft.drafters import dflash, eagle3
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.method import settings
from sharpdraft.model.causal_lm import CausalLM
from support.checkpoints import Checkpoints
from support.command import Run, check_one_line
from support.drafters import drafter_config, drafter_tensors
from support.families import eagle_config, eagle_tensors
from support.tiny import BLOCK


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no settings file"),
        ("[]", "is no settings file"),
        ('{"scale": {"kind": "fixed_slope"}}', "reference is missing"),
        ('{"scale": {"kind": "fixed_slope", "reference": 8}}', "must be above top_k"),
        ('{"scale": {"kind": "magic"}}', '"kind"'),
        ('{"policy": {"kind": "fixed_slope"}}', "reference is missing"),
        ('{"policy": {"kind": "magic"}}', '"kind"'),
        ('{"view": {"kind": "window", "keys": 0}}', "view, kind window: keys must be"),
        ('{"length": {"kind": "constant", "scale": 1.2}}', 'length: give a mapping with "kind"'),
        ('{"scales": {}}', "no part 'scales'"),
    ],
)
def test_broken_settings_file(
    run: Run, saved: Checkpoints, tmp_path: Path, text: str, message: str
) -> None:
    shutil.copytree(saved.drafter, tmp_path / "drafter")
    (tmp_path / "drafter" / settings.FILE).write_text(text)
    result = run("generate", "w9", "--target", saved.target, "--drafter", tmp_path / "drafter")
    check_one_line(result, str(tmp_path / "drafter" / settings.FILE), message)


def test_the_settings_file_names_the_drafts(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    """As it is written now, and as its first version had it, counting the anchor."""
    folder = shutil.copytree(saved.drafter, tmp_path / "drafter")
    policy = {"policy": {"kind": "fixed_slope", "reference": 40}}
    drafted = {}
    for name, said in {
        "neither": policy,
        "length": {"length": {"kind": "fixed", "drafts": 2}},
        "block": policy | {"block": 3},
    }.items():
        (folder / "sharpdraft.json").write_text(json.dumps(said))
        drafted[name] = load_drafter(folder, CausalLM.of(saved.model)).num_drafts
    assert drafted == {"neither": BLOCK - 1, "length": 2, "block": 2}
    for wrong in (1, "4", 3.0, True):
        (folder / "sharpdraft.json").write_text(json.dumps(policy | {"block": wrong}))
        line = run("generate", "w9", "--target", saved.target, "--drafter", folder)
        check_one_line(line, f"block is {wrong!r}: it must be an integer of at least 2")
    (folder / "sharpdraft.json").write_text(json.dumps(policy | {"block": BLOCK + 1}))
    line = run("generate", "w9", "--target", saved.target, "--drafter", folder)
    check_one_line(line, f"{BLOCK} drafts", f"at most {BLOCK - 1}")


def test_what_is_drafted_is_what_is_asked_for(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    """An arm's own number, else --drafts, else the settings file's."""
    folder = shutil.copytree(saved.drafter, tmp_path / "drafter")
    scale = {"kind": "fixed_slope", "reference": 40}
    (folder / "sharpdraft.json").write_text(
        json.dumps({"scale": scale, "length": {"kind": "fixed", "drafts": 4}})
    )
    (tmp_path / "prompts.txt").write_text("w9 w10\n")

    def drafted(out: str, *options: object) -> dict[str, int]:
        arms = ("--arms", "ar,frozen,sharpdraft,sharpdraft@50,frozen+drafts@1", "--json")
        result = run(
            *("bench", "--target", saved.target, "--drafter", folder, *arms, *options),
            *("--prompts", tmp_path / "prompts.txt", "--out", tmp_path / out),
        )
        assert result.code == 0, result.err
        row = json.loads((tmp_path / out / "rows.jsonl").read_text().splitlines()[1])
        rounds = {name: arm["rounds"] for name, arm in row["arms"].items() if name != "ar"}
        return {name: max(count for _, count, _ in own) for name, own in rounds.items()}

    assert drafted("own") == {
        "frozen": 4,
        "sharpdraft": 4,
        "sharpdraft@50": 4,
        "frozen+drafts@1": 1,
    }
    assert drafted("asked", "--drafts", 3) == {
        "frozen": 3,
        "sharpdraft": 3,
        "sharpdraft@50": 3,
        "frozen+drafts@1": 1,
    }


def test_generate_without_settings_says_so(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(saved.drafter, tmp_path / "drafter")
    (tmp_path / "drafter" / settings.FILE).unlink()
    options = (
        "--target",
        saved.target,
        "--drafter",
        tmp_path / "drafter",
        "--max-new-tokens",
        4,
        "--json",
    )
    result = run("generate", "w9", *options)
    assert result.code == 0 and json.loads(result.out)["token_ids"]
    note = " ".join(result.err.split())
    assert "has no sharpdraft.json" in note and "N0 = 2048" in note
    for known in ("ar", "frozen", "sharpdraft@50", "window@50"):
        assert run("generate", "w9", *options, "--arm", known).err == ""


def test_an_eagle_without_settings_is_told_whose_are_used(
    run: Run, saved: Checkpoints, tmp_path: Path
) -> None:
    target, config = CausalLM.of(saved.model), eagle_config()
    eagle3.save(tmp_path / "eagle", config, eagle_tensors(config, target))
    options = ("--target", saved.target, "--drafter", tmp_path / "eagle", "--max-new-tokens", 2)
    said = run("generate", "w9", *options).err
    assert "the paper names no N0 for EAGLE-3" in said and "using DFlash's" in said


def test_the_family_is_told_or_said(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    """config.json names EAGLE-3, the weights are a DFlash's: `--family` decides."""
    config = drafter_config()
    dflash.save(tmp_path / "odd", config, drafter_tensors(config))
    path = tmp_path / "odd" / "config.json"
    path.write_text(path.read_text().replace("DFlashDraftModel", "LlamaForCausalLMEagle3"))
    options = ("--target", saved.target, "--drafter", tmp_path / "odd", "--max-new-tokens", 8)
    options = (*options, "--arm", "frozen", "--json")
    check_one_line(run("generate", "w9", *options), "EAGLE-3's", "DFlash's", "--family")
    found = run("generate", "w9", *options, "--family", "dflash")
    assert found.code == 0, found.err
    alone = run("generate", "w9", "--target", saved.target, "--arm", "ar", *options[4:6], "--json")
    assert json.loads(found.out)["token_ids"] == json.loads(alone.out)["token_ids"]
    check_one_line(run("generate", "w9", *options, "--family", "eagle"), "--family eagle", "one of")
    check_one_line(
        run("bench", "--base-url", "http://127.0.0.1:1", "--family", "pard"), "--family is for"
    )
