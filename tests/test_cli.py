"""The commands from outside: what is printed where, and that every foreseeable mistake is one line
on stderr."""

from __future__ import annotations

import copy
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from conftest import (
    BLOCK,
    CHAT,
    POSITIONS,
    VOCAB,
    Checkpoints,
    Result,
    Run,
    check_one_line,
    continuation,
    drafter_config,
    drafter_tensors,
)
from sharpdraft import cli
from sharpdraft.decode.session import Session
from sharpdraft.drafters import load_drafter
from sharpdraft.drafters.dflash import DFlash, save
from sharpdraft.hub import models
from sharpdraft.method import settings
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.train import pipeline
from sharpdraft.train.dflash import Recipe
from sharpdraft.workloads import tasks
from sharpdraft.workloads.tasks import Recording, Turn

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


# Help and usage


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(run: Run, command: str) -> None:
    result = run(*command.split(), "--help")
    assert (result.code, result.err) == (0, "")
    assert "Usage: " in result.out and f" {command} [OPTIONS]".replace("  ", " ") in result.out


def test_help_of_the_program_lists_the_commands() -> None:
    """In a process of its own, without transformers: help must come at once."""
    code = "import sys; from sharpdraft import cli; sys.argv[1:] = ['--help']\ntry: cli.main()\n"
    code += "finally: sys.stderr.write('transformers' * ('transformers' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(
        command in done.stdout for command in ("generate", "demo", "bench", "train", "record")
    )


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "generate hi --max-new-tokens 0",
        "generate hi --nonsense",
        "generate hi --reference 0",
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


# Mistakes


def test_generate_says_what_is_wrong(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    both = ("--target", saved.target, "--drafter", saved.drafter)
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "a-file").write_text("")
    check_one_line(
        run("generate", "w9", "--arm", "sharp", *both),
        "unknown arm 'sharp'",
        "known are ar, frozen",
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
        run("generate", "w9", *both, "--reference", 32),
        "--reference: reference (N0) must be above top_k",
    )
    check_one_line(
        run("generate", "w9", *both, "--weights", "int4"),
        "--weights int4: the only choice is bfloat16",
    )
    for block in (1, BLOCK + 1):
        check_one_line(
            run("generate", "w9", *both, "--block", block),
            f"block size {block}: this drafter drafts",
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
    ("text", "message"),
    [
        ("{", "is not a settings file"),
        ("[]", "is not a settings file"),
        ("{}", "is not a settings file"),
        ('{"policy": {"kind": "fixed_slope"}}', '"reference"'),
        ('{"policy": {"kind": "fixed_slope", "reference": 8}}', "must be above top_k"),
        ('{"policy": {"kind": "magic"}}', '"kind"'),
        (
            '{"policy": {"kind": "constant", "scale": 1.2}}',
            'the policy must be of kind "fixed_slope"',
        ),
    ],
)
def test_broken_settings_file(
    run: Run, saved: Checkpoints, tmp_path: Path, text: str, message: str
) -> None:
    shutil.copytree(saved.drafter, tmp_path / "drafter")
    (tmp_path / "drafter" / settings.FILE).write_text(text)
    result = run("generate", "w9", "--target", saved.target, "--drafter", tmp_path / "drafter")
    check_one_line(result, str(tmp_path / "drafter" / settings.FILE), message)


def test_the_settings_file_names_the_block(run: Run, saved: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(saved.drafter, tmp_path / "drafter")
    policy = {"policy": {"kind": "fixed_slope", "reference": 40}}
    drafted = {}
    for block in (None, 3):
        (folder / "sharpdraft.json").write_text(
            json.dumps(policy | ({} if block is None else {"block": block}))
        )
        drafter = load_drafter(folder, CausalLM(saved.model))
        drafted[block] = Session(drafter.target, drafter).size
    assert drafted == {None: BLOCK, 3: 3}
    for wrong in (1, BLOCK + 1, "4", 3.0, True):
        (folder / "sharpdraft.json").write_text(json.dumps(policy | {"block": wrong}))
        line = run("generate", "w9", "--target", saved.target, "--drafter", folder)
        check_one_line(line, f"block is {wrong!r}, it must be from 2 to {BLOCK}")


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
    check_one_line(run("bench", *both, "--prompts", bad), f'{bad}, line 2: needs "prompt"')
    check_one_line(run("bench", *both, *prompts, "--arms", "ar,froze"), "unknown arm 'froze'")
    check_one_line(run("bench", *both, *prompts, "--arms", " ,"), "--arms names no arm")
    check_one_line(
        run("bench", *both, *prompts, "--replay", "ar"), "--replay takes drafting arms only"
    )
    check_one_line(run("bench", *both, *prompts, "--block", 1), "block size 1")
    check_one_line(
        run("bench", "--target", saved.target, *prompts), f"no drafter comes with {saved.target}"
    )
    check_one_line(run("bench", *both, *prompts, "--out", good), str(good))
    good.write_text("w9 " * POSITIONS)
    check_one_line(run("bench", *both, *prompts), "nothing was measured")


@pytest.mark.parametrize(
    ("template", "tokenizer"),
    [
        (None, {}),
        ("{% for m in messages %}[INST] {{ m['content'] }} {% endfor %}", {}),
        (CHAT, {"eos_token": None}),
    ],
)
def test_bench_of_a_target_that_does_not_chat_like_this(
    run: Run, saved: Checkpoints, tmp_path: Path, template: str | None, tokenizer: dict[str, Any]
) -> None:
    target = tmp_path / "target"
    shutil.copytree(saved.target, target)
    (target / "chat_template.jinja").unlink()
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(config | tokenizer))
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["w9", "w10"]}\n')
    result = run(
        *("bench", "--target", target, "--drafter", saved.drafter),
        *("--prompts", tmp_path / "prompts.jsonl", "--answer-tokens", 8),
    )
    check_one_line(result, "chat template")


def test_train_and_record_say_what_is_wrong(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    target = ("--target", saved.target)
    check_one_line(
        run("record", *target, "--out", tmp_path / "r", "--length", POSITIONS + 1),
        "takes at most 256",
    )
    small = ("--sessions", 1, "--length", 64)
    check_one_line(run("record", *target, "--out", file / "r", *small), str(file))
    # The recipe reads layers of a target as deep as SmolLM2, which this one is not.
    result = run("train", "dflash", *target, "--out", tmp_path / "t", "--batch", 1, "--tokens", 1)
    check_one_line(result, "4 layers")
    monkeypatch.setitem(pipeline.RECIPES, "dflash", RECIPE)
    result = run(
        "train",
        "dflash",
        *target,
        "--out",
        tmp_path / "t",
        "--batch",
        1,
        "--tokens",
        1,
        "--context",
        257,
    )
    check_one_line(result, "257")
    check_one_line(
        run(
            "train", "dflash", *target, "--out", file, "--batch", 1, "--tokens", 1, "--context", 64
        ),
        f"cannot write to {file}",
    )
    shutil.copytree(saved.target, tmp_path / "endless")
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / "endless" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    result = run("record", "--target", tmp_path / "endless", "--out", tmp_path / "r", *small)
    check_one_line(result, "eos_token_id")


# Generating


def prompt_ids(saved: Checkpoints, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    rendered = saved.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, tokenize=False
    )
    return list(saved.tokenizer(rendered, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    "arm", ["ar", "frozen", "sharpdraft", "sharpdraft@64", "fixed@1.3", "window@50"]
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
        cli, "out", Console(file=screen, force_terminal=True, color_system="standard")
    )
    plain = run("generate", "w16 w20 w19", *options, "--arm", "ar")
    assert plain.code == 0 and "\x1b[" not in screen.getvalue()
    text = screen.getvalue()
    screen.truncate(screen.seek(0))
    assert run("generate", "w16 w20 w19", *options, "--arm", "frozen").code == 0
    shown = screen.getvalue()
    assert re.sub(r"\x1b\[\d+m", "", shown) == text
    target = CausalLM(saved.model)
    session = Session(target, DFlash.load(saved.drafter, target))
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
        *("--max-new-tokens", 20, "--block", 3),
    )
    assert json.loads(result.out)["token_ids"] == answer


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
    assert run("generate", "w9", *options, "--reference", 50).err == ""


# Benching


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
    check_one_line(
        bench(run, saved, "--temperature", 1, "--replay", "frozen"), "a replay follows a known text"
    )


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
    check_one_line(
        bench(run, saved, *options, "--reference", 64, "--arms", "ar,sharpdraft"), "other settings"
    )
    prompts.write_text("w10\n")
    check_one_line(bench(run, saved, *options), "other settings")
    prompts.write_text("w9\n")
    check_one_line(bench(run, saved, *options, "--answer-tokens", 13), "other settings")
    assert bench(run, saved, *options).code == 0


def test_interrupted_bench_says_how_to_go_on(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sharpdraft.lab.runs import RunLog

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
    monkeypatch.setattr(models, "built_in_drafter", lambda target, family="dflash": saved.drafter)
    monkeypatch.setattr(cli, "_BUILT_IN", str(saved.target))
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


# Training and recording

RECIPE = Recipe(
    block=4,
    layers=1,
    taps=(0, 3),
    start_layers=(2,),
    mask_token=3,
    steps=3,
    sequences=2,
    anchors=8,
    warmup=1,
    negatives=8,
)


def test_train_writes_a_drafter_that_runs(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pipeline.RECIPES, "dflash", RECIPE)
    out = tmp_path / "run"
    options = (
        "--target",
        saved.target,
        "--out",
        out,
        "--tokens",
        512,
        "--context",
        128,
        "--batch",
        2,
    )
    result = run("train", "dflash", *options)
    assert result.code == 0, result.err
    assert result.out == f"{out / 'drafter'}\n"
    assert sorted(p.name for p in (out / "text").iterdir()) == [
        "about.json",
        "held-000.safetensors",
        "wave-000.safetensors",
        "wave-001.safetensors",
    ]
    times = {path: path.stat().st_mtime_ns for path in (out / "text").iterdir()}
    weights = (out / "drafter" / "model.safetensors").read_bytes()
    again = run("train", "dflash", *options)
    assert (again.code, again.out) == (0, result.out)
    assert {path: path.stat().st_mtime_ns for path in (out / "text").iterdir()} == times
    assert (out / "drafter" / "model.safetensors").read_bytes() == weights
    check_one_line(run("train", "dflash", *options[:-1], 4), "text made otherwise", "--out")
    said = run(
        "generate",
        "w9",
        "--target",
        saved.target,
        "--drafter",
        out / "drafter",
        "--json",
        "--reference",
        40,
    )
    assert (
        json.loads(said.out)["token_ids"]
        == continuation(saved.model, prompt_ids(saved, "w9"), 512)[:250]
    )
    wave = out / "text" / "wave-001.safetensors"
    wave.write_bytes(wave.read_bytes()[:-100])
    (out / "state.pt").unlink()
    check_one_line(
        run("train", "dflash", *options), f"a wave in {out / 'text'} is corrupt", "remove it"
    )


def test_record(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pipeline, "_writing_dtype", lambda device: None
    )  # In bfloat16, close tokens may change places.
    file = tmp_path / "new" / "sessions.safetensors"
    result = run(
        "record", "--target", saved.target, "--out", file, "--sessions", 2, "--length", 200
    )
    assert (result.code, result.out) == (0, f"{file}\n")
    tensors = load_file(file)
    from sharpdraft.workloads.tasks import built_in

    assert sorted(tensors) == sorted(
        f"{t.name}.{kind}" for t in built_in()[:2] for kind in ("tokens", "turns")
    )
    for task in built_in()[:2]:
        tokens, turns = (
            tensors[f"{task.name}.tokens"].tolist(),
            tensors[f"{task.name}.turns"].tolist(),
        )
        assert len(tokens) == 200
        start, answer, end = turns[0]
        assert (start, tokens[:answer]) == (0, prompt_ids(saved, task.turns[0]))
        assert tokens[answer:end] == continuation(saved.model, tokens[:answer], end - answer)


def test_record_of_a_large_vocabulary(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token ids beyond 65,535, as Qwen's vocabulary has them, come back as they were written."""

    def written(
        target: Any, turns: Any, length: int, *args: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        target.vocab_size = 151_936
        own = torch.arange(length) >= length // 2
        return {"tokens": (torch.arange(length) + 151_000)[None].int(), "written": own[None]}

    monkeypatch.setattr(pipeline, "write_wave", written)
    file = tmp_path / "sessions.safetensors"
    result = run("record", "--target", saved.target, "--out", file, "--sessions", 1, "--length", 64)
    assert result.code == 0
    tokens = next(tensor for name, tensor in load_file(file).items() if name.endswith("tokens"))
    assert tokens.tolist() == list(range(151_000, 151_064))
