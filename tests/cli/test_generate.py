"""`generate` from outside: what is printed where, and that what is wrong is one line."""

from __future__ import annotations

import copy
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from sharpdraft.decode.session import Session
from sharpdraft.drafters.dflash import save
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.model.causal_lm import CausalLM
from support.checkpoints import Checkpoints
from support.command import Run, check_one_line, prompt_ids
from support.drafters import drafter_config, drafter_tensors
from support.tiny import BLOCK, POSITIONS, VOCAB, continuation


def test_generate_says_what_is_wrong(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    both = ("--target", saved.target, "--drafter", saved.drafter)
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "a-file").write_text("")
    check_one_line(
        run("generate", "w9", "--arm", "sharp", *both),
        "arm 'sharp': unknown",
        "known are",
        "frozen",
    )
    check_one_line(
        run("generate", "w9", "--arm", "fixed@0", *both), "arm 'fixed@0': scale must be a positive"
    )
    check_one_line(run("generate", "w9", "--arm", "window@0", *both), "arm 'window@0'")
    check_one_line(run("generate", "", *both), "the prompt is empty: give a text")
    check_one_line(run("generate", " \n\t", *both), "the prompt is empty: give a text")
    check_one_line(run("generate", *both, stdin="\n"), "the prompt is empty: give a text")
    check_one_line(
        run("generate", "w9", "--target", saved.target), f"no drafter comes with {saved.target}"
    )
    nowhere = "/no/where/at all"
    check_one_line(
        run("generate", "w9", "--arm", "ar", "--target", nowhere), f"'{nowhere}' does not exist"
    )
    check_one_line(
        run("generate", "w9", "--target", saved.target, "--drafter", nowhere),
        f"'{nowhere}' does not exist",
    )
    check_one_line(
        run("generate", "w9", "--arm", "ar", "--target", tmp_path / "a-file"), "is a file"
    )
    check_one_line(run("generate", "w9", "--arm", "ar", "--target", empty), "holds no config.json")
    check_one_line(run("generate", "w9", "--arm", "ar", "--target", saved.drafter), "")
    check_one_line(
        run("generate", "w9", *both, "--device", "toaster"), "there is no device 'toaster' here"
    )
    check_one_line(
        run("generate", "w9", *both, "--arm", "sharpdraft@32"),
        "arm 'sharpdraft@32': reference (N0) must be above top_k",
    )
    check_one_line(
        run("generate", "w9", *both, "--weights", "int4"),
        "--weights int4: the only choice is bfloat16",
    )
    for said in (("--drafts", BLOCK), ("--arm", f"frozen+drafts@{BLOCK}")):
        check_one_line(
            run("generate", "w9", *both, *said),
            f"length: {BLOCK} drafts a round",
            f"1 to {BLOCK - 1}",
        )
    check_one_line(
        run("generate", "w9 " * POSITIONS, *both), "tokens does not fit", f"of {POSITIONS} are left"
    )


def test_drafter_of_another_target(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    config = drafter_config(num_target_layers=36)
    save(tmp_path / "other", config, drafter_tensors(config))
    (tmp_path / "other" / "sharpdraft.json").write_text(
        '{"policy": {"kind": "fixed_slope", "reference": 64}}'
    )
    result = run("generate", "w9", "--target", saved.target, "--drafter", tmp_path / "other")
    check_one_line(result, "belongs to another target", "number of target layers is 36")
    assert "trained for this target" in result.err


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("window@50+window@60", "'window@60' in 'window@50+window@60': view is named twice"),
        ("sharpdraft+fixed@1.2", "scale is named twice"),
        ("sinks@4", "sinks need a window"),
        ("sinks@0+window@50", "'sinks@0' in 'sinks@0+window@50': give a number of Keys"),
        ("frozen+nothing", "'nothing' in 'frozen+nothing': unknown"),
        ("ar+window@50", "'ar' in 'ar+window@50': unknown"),
        (f"window@{BLOCK - 1}", f"window@{BLOCK - 1}"),
        ("window@5+drafts@5", "window@5"),
        ("slopes@64:3/4/5", "it is for 3 layers, and the drafter has 2"),
    ],
)
def test_arms_that_make_no_sense(run: Run, saved: Checkpoints, arm: str, message: str) -> None:
    both = ("--target", saved.target, "--drafter", saved.drafter)
    check_one_line(run("generate", "w9", *both, "--arm", arm), message)


def test_an_unknown_arm_is_refused_before_a_checkpoint_is_looked_for(run: Run) -> None:
    where = ("--target", "/no/where", "--drafter", "/no/where/either")
    check_one_line(run("generate", "w9", *where, "--arm", "sharp"), "arm 'sharp'")
    check_one_line(run("generate", "w9", *where, "--arm", "frozen"), "'/no/where/either' does not")


@pytest.mark.parametrize(
    "arm",
    [
        "ar",
        "frozen",
        "sharpdraft",
        "sharpdraft@64",
        "fixed@1.3",
        "window@50",
        "window@30+sharpdraft@40",
        "sinks@4+window@30",
        "sharpdraft+sinks@2+window@30+drafts@3",
        "slopes@40:4/6",
    ],
)
def test_generate_json(run: Run, saved: Checkpoints, arm: str) -> None:
    text = "w9 w20 w41"
    ids = prompt_ids(saved, text)
    assert ids == [1, 4, 9, 20, 41, 2, 1, 5]
    answer = continuation(saved.model, ids, 60)
    result = run(
        *("generate", text, "--target", saved.target, "--drafter", saved.drafter),
        *("--arm", arm, "--max-new-tokens", 60, "--json"),
    )
    assert (result.code, result.err) == (0, "")
    said = json.loads(result.out)
    assert said["token_ids"] == answer
    assert said["text"] == saved.tokenizer.decode(answer, skip_special_tokens=True)
    assert (said["arm"], said["prompt_tokens"]) == (arm, 8)
    assert said["finish"] == ("stop" if answer[-1] == 2 else "length")
    assert (
        said["tokens_per_second"] > 0 and said["decode_seconds"] > 0 and said["prefill_seconds"] > 0
    )
    assert (said["mal"] is None) if arm == "ar" else (said["mal"] > 1)


def test_generate_with_rounded_weights(run: Run, saved: Checkpoints) -> None:
    """What transformers writes with the same weights rounded, behind a text where that is something
    else."""
    rounded = copy.deepcopy(saved.model)
    for parameter in rounded.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.bfloat16().float()
    both = (
        (
            text,
            *(
                continuation(model, prompt_ids(saved, text), 150)
                for model in (saved.model, rounded)
            ),
        )
        for text in (f"w{i} w20 w41" for i in range(6, VOCAB))
    )
    text, _, expected = next(found for found in both if found[1] != found[2])
    for arm in ("ar", "sharpdraft"):
        result = run(
            *("generate", text, "--target", saved.target, "--drafter", saved.drafter, "--arm", arm),
            *("--max-new-tokens", 150, "--json", "--weights", "bfloat16"),
        )
        assert json.loads(result.out)["token_ids"] == expected


def test_generate_samples(run: Run, saved: Checkpoints) -> None:
    def tokens(*options: object) -> list[int]:
        model = (
            "--target",
            saved.target,
            "--drafter",
            saved.drafter,
            "--max-new-tokens",
            40,
            "--json",
        )
        result = run("generate", "w9 w20 w41", *model, *options)
        assert result.code == 0, result.err
        return list(json.loads(result.out)["token_ids"])

    greedy = tokens()
    assert tokens("--temperature", 0) == tokens("--temperature", 1.5, "--top-k", 1) == greedy
    assert (
        tokens("--temperature", 1.5, "--top-p", 1e-9)
        == tokens("--temperature", 2, "--min-p", 1)
        == greedy
    )
    drawn = tokens("--temperature", 1.5, "--seed", 3)
    assert (
        drawn
        == tokens("--temperature", 1.5, "--seed", 3)
        != tokens("--temperature", 1.5, "--seed", 4)
    )
    penalised = tokens("--repetition-penalty", 5)
    assert len(set(penalised)) > len(set(greedy))
    check_one_line(run("generate", "w9", "--top-p", 2), "top_p is 2.0: it must be from 0 to 1")


def test_generate_shows_the_text_and_nothing_else_on_stdout(run: Run, saved: Checkpoints) -> None:
    answer = continuation(saved.model, prompt_ids(saved, "w9 w30"), 40)
    text = saved.tokenizer.decode(answer, skip_special_tokens=True)
    options = ("--target", saved.target, "--drafter", saved.drafter, "--max-new-tokens", 40)
    for arm in ("ar", "sharpdraft"):
        shown = run("generate", "w9 w30", *options, "--arm", arm)
        assert (shown.code, shown.out) == (0, text + "\n")
        assert shown.err.startswith(f"{arm}: {len(answer)} tokens, ") and shown.err.count("\n") == 1
        assert ("tokens a verification" in shown.err) == (arm != "ar")
        assert run("generate", *options, "--arm", arm, stdin="w9 w30").out == shown.out


def test_generate_shows_accepted_drafts_in_green(
    run: Run, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--target", saved.target, "--drafter", saved.drafter, "--max-new-tokens", 60)
    screen = io.StringIO()
    monkeypatch.setattr(
        "sharpdraft.cli.generate.out",
        Console(file=screen, force_terminal=True, color_system="standard"),
    )
    plain = run("generate", "w16 w20 w19", *options, "--arm", "ar")
    assert plain.code == 0 and "\x1b[" not in screen.getvalue()
    text = screen.getvalue()
    screen.truncate(screen.seek(0))
    assert run("generate", "w16 w20 w19", *options, "--arm", "frozen").code == 0
    shown = screen.getvalue()
    assert re.sub(r"\x1b\[\d+m", "", shown) == text
    target = CausalLM.of(saved.model)
    session = Session(target, load_drafter(saved.drafter, target))
    rounds = list(session.generate(prompt_ids(saved, "w16 w20 w19"), 60, (2,)))
    drafts = [token for done in rounds for token in done.tokens[: done.accepted]]
    green = " ".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", shown)).split()
    assert len(drafts) > 20 and green == saved.tokenizer.decode(drafts).split()


def test_generate_raw(run: Run, saved: Checkpoints) -> None:
    answer = continuation(saved.model, [9, 30], 20)
    result = run(
        *(
            "generate",
            "w9 w30",
            "--raw",
            "--json",
            "--target",
            saved.target,
            "--drafter",
            saved.drafter,
        ),
        *("--max-new-tokens", 20, "--drafts", 2),
    )
    assert json.loads(result.out)["token_ids"] == answer
