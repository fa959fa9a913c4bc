"""Benching engines from outside, with an engine that is scripted."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sharpdraft.decode.session import Session
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.errors import SharpDraftError
from sharpdraft.hub.targets import load_target
from sharpdraft.lab.arms import AR, arms_of
from sharpdraft.lab.backends.groups import Group, Prompt, groups_of, recorded_prompts, run_groups
from sharpdraft.lab.backends.vllm import Engine, asked_for, drafts_of, speculative_config
from sharpdraft.lab.plan import Plan
from sharpdraft.lab.statistics import summarise
from sharpdraft.method.policies import Constant, FixedSlope
from sharpdraft.method.settings import (
    DraftSettings,
    FixedLength,
    Window,
    asked_settings,
    write_settings,
)
from sharpdraft.workloads.tasks import Recording, Turn
from support.checkpoints import Checkpoints
from support.command import Run, check_one_line
from support.tiny import BLOCK

EDGES = (16, 32, 64)


def test_groups_hold_prompts_of_one_bucket() -> None:
    lengths = [10, 40, 12, 16, 17, 64, 65]
    prompts = [Prompt(f"p{n}", tuple(range(n)), n) for n in lengths]
    groups = groups_of(prompts, EDGES, 2)
    assert [[len(p) for p in group.prompts] for group in groups] == [[10, 12], [16], [17], [40, 64]]
    assert [group.name for group in groups] == ["p10+p12", "p16", "p17", "p40+p64"]
    assert [group.answer_tokens for group in groups] == [12, 16, 17, 64]


def test_recorded_prompts_are_the_labs_turns() -> None:
    recording = Recording("r", tuple(range(64)), (Turn(0, 2, 40), Turn(40, 44, 64)))
    plan = Plan("t", "d", (AR,), (), 1, EDGES)
    assert (
        recorded_prompts([recording], plan, 64) == [Prompt("r-0", (0, 1), 38)]
        or recorded_prompts([recording], plan, 64) == []
    )


def test_what_arms_ask_of_an_engine() -> None:
    own = DraftSettings(FixedSlope(64, slope=4.0), length=FixedLength(3))
    expected = {
        "frozen": DraftSettings(),
        "sharpdraft": own,
        "sharpdraft@99:slope=4": DraftSettings(FixedSlope(99, slope=4.0)),
        "fixed@1.2": DraftSettings(Constant(1.2)),
        "window@64+sinks@4+sharpdraft@40": DraftSettings(FixedSlope(40), Window(64, 4)),
    }
    assert asked_for(AR) is None
    for arm, settings in zip(arms_of(list(expected), {"": own}), expected.values(), strict=True):
        asked = json.loads(json.dumps(asked_for(arm)))
        assert asked_settings(asked, None) == settings


def test_as_many_drafts_as_in_the_labs_loop(saved: Checkpoints, tmp_path: Path) -> None:
    """The arm's own length, or else what `load_drafter` takes from the same directory."""
    target, _ = load_target(str(saved.target))
    folder = shutil.copytree(saved.drafter, tmp_path / "drafter")
    frozen, short = arms_of(["frozen", "frozen+drafts@2"], {"": DraftSettings()})
    for length, expected in ((None, BLOCK - 1), (FixedLength(3), 3)):
        write_settings(folder / "sharpdraft.json", DraftSettings(length=length))
        session = Session(target, load_drafter(folder, target))
        for arm, count in ((frozen, expected), (short, 2)):
            session.use(arm)
            assert drafts_of(arm, folder) == session.num_drafts == count


class Scripted:
    def __init__(
        self, log: list[str], name: str, accepted: int, wrong_at: int | None = None
    ) -> None:
        self.log, self.name, self.accepted, self.wrong_at = log, name, accepted, wrong_at

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[int] = ()
    ) -> dict[str, Any]:
        self.log.append(self.name)
        texts = [[p[-1]] * max_tokens for p in prompts]
        if self.wrong_at is not None:
            texts[-1][self.wrong_at] = -1
        rounds = [[(len(p), 5, self.accepted)] * 3 for p in prompts] if self.accepted else []
        return {
            "tokens": texts,
            "rounds": rounds,
            "first": 0.5,
            "seconds": 2.0,
            "decoded": max_tokens * len(prompts),
        }

    def close(self) -> None:
        pass


def test_arms_take_turns_and_rows_become_the_labs_table() -> None:
    groups = [Group(f"g{i}", ((1,) * 10, (2,) * 12), 6) for i in range(4)]
    log: list[str] = []
    rows: list[dict[str, Any]] = []
    backends = {
        "ar": Scripted(log, "ar", 0),
        "frozen": Scripted(log, "frozen", 1),
        "sharpdraft": Scripted(log, "sharpdraft", 2),
    }
    run_groups(groups, backends, (), [], rows.append)
    names = list(backends)
    assert log == [*names, "frozen", "sharpdraft", "ar", "sharpdraft", "ar", "frozen", *names]
    assert [list(row["arms"]) for row in rows] == [["ar", "frozen", "sharpdraft"]] * 4
    assert all(row["differences"] == {} and row["context"] == 11 for row in rows)
    cells = {cell.arm: cell for cell in summarise(json.loads(json.dumps(rows)), EDGES)}
    assert cells["frozen"].mal and cells["frozen"].mal.value == 2.0
    assert cells["sharpdraft"].mal and cells["sharpdraft"].mal.value == 3.0
    assert cells["sharpdraft"].speedup and cells["sharpdraft"].speedup.value == 1.0
    assert cells["ar"].speed and cells["ar"].speed.value == 6.0
    again: list[dict[str, Any]] = []
    run_groups(groups, backends, (), rows[:3], again.append)
    assert [row["session"] for row in again] == ["g3"]


def test_a_difference_is_told() -> None:
    rows: list[dict[str, Any]] = []
    log: list[str] = []
    backends = {"ar": Scripted(log, "ar", 0), "frozen": Scripted(log, "frozen", 1, wrong_at=4)}
    run_groups([Group("g", ((1,), (2,)), 6)], backends, (), [], rows.append)
    assert rows[0]["differences"] == {"frozen": {"request": 1, "at": 4}}


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["DFlashDraftModel"]}, {"method": "dflash"}),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, {"method": "eagle3"}),
        ({"speculators_model_type": "eagle3"}, {"method": "eagle3"}),
        ({"pard_token": 7}, {"method": "draft_model", "parallel_drafting": True}),
    ],
)
def test_what_vllm_is_told_of_a_drafter(
    tmp_path: Path, config: dict[str, Any], method: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = {**method, "model": str(tmp_path), "num_speculative_tokens": 4}
    assert speculative_config(tmp_path, 4) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "llama.cpp"), "known is vllm"),
        (("--engine", "vllm", "--base-url", "http://x"), "not both"),
        (("--engine", "vllm", "--engine-args", "{"), "no JSON"),
        (("--engine", "vllm", "--arms", "sharpdraft@8"), "reference (N0) must be above top_k"),
        (("--base-url", "http://127.0.0.1:9"), "no OpenAI-compatible server"),
    ],
)
def test_bench_refuses(
    run: Run, saved: Checkpoints, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w9\n")
    common = ("bench", "--target", saved.target, "--drafter", saved.drafter, "--prompts", prompts)
    result = run(*common, *options)
    check_one_line(result, message)


def test_an_engine_where_vllm_is_not_installed(tmp_path: Path) -> None:
    """The child is a process of its own, so that what is missing here is missing there."""
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(SharpDraftError, match="install vllm"):
        Engine(tmp_path, None, 5, None, log=tmp_path / "log")


def test_an_engine_child_that_dies(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(SharpDraftError, match="exit code 3"):
        Engine(tmp_path, None, 5, None, log=tmp_path / "log", python=str(python))
