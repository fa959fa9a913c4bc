"""`train` and `record` from outside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sharpdraft.train import pipeline
from sharpdraft.train.dflash import Recipe
from sharpdraft.workloads import registry
from sharpdraft.workloads.tasks import Task
from sharpdraft.workloads.workload import Workload
from support.checkpoints import Checkpoints
from support.command import Run, check_one_line, prompt_ids
from support.tiny import POSITIONS, continuation


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
    (tmp_path / "endless" / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    result = run("record", "--target", tmp_path / "endless", "--out", tmp_path / "r", *small)
    check_one_line(result, "chat template does not show earlier answers")


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
        "--arm",
        "sharpdraft@40",
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


def test_record_of_workloads(
    run: Run, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lead of a session stands before its first turn; at a temperature text is drawn."""
    monkeypatch.setattr(pipeline, "_writing_dtype", lambda device: None)
    read = "w20 w21 w22\n"
    several = [Task(n, (f"{read}w9", "w30", "w31"), lead=len(read)) for n in ("one", "two")]

    def workload(name: str, sessions: list[Task], temperature: float = 0.0) -> Workload:
        return Workload(name, "", "", "", lambda reader: sessions[: reader.sessions], temperature)

    ours = {
        "calm": workload("calm", several),
        "hot": workload("hot", several, 1.5),
        "single": workload("single", [Task("one", ("w9",))]),
    }
    monkeypatch.setattr(registry, "WORKLOADS", ours)
    texts = {}
    for name in ("hot", "calm"):
        file = tmp_path / f"{name}.safetensors"
        options = ("--target", saved.target, "--out", file, "--length", 120, "--workload", name)
        assert run("record", *options).code == 0
        with safe_open(str(file), "pt") as opened:
            assert opened.metadata() == {"target": str(saved.target), "workload": name}
            texts[name] = opened.get_tensor("one.tokens").tolist()
            spans = opened.get_tensor("two.turns").tolist()
        prompt = prompt_ids(saved, f"{read}w9")
        assert texts[name][: len(prompt)] == prompt
        # Read before the first turn: user, and the lead of three words.
        assert spans[0][:2] == [5, len(prompt)] and spans[1][0] == spans[0][2]
    _, answer, end = spans[0]
    written = continuation(saved.model, prompt, end - answer)
    assert texts["calm"][answer:end] == written[: len(texts["calm"][answer:end])]
    assert texts["hot"] != texts["calm"]
    options = ("--target", saved.target, "--out", file, "--length", 120, "--temperature", 0)
    assert run("record", *options, "--workload", "hot").code == 0
    assert load_file(file)["one.tokens"].tolist() == texts["calm"]
    file = tmp_path / "single.safetensors"
    options = ("--target", saved.target, "--out", file)
    check_one_line(run("record", *options, "--workload", "single"), "nothing is recorded")
    check_one_line(run("record", *options, "--workload", "cold"), "known are calm, hot, single")


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
