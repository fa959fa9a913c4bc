"""Benching engines from outside, with an engine that is scripted."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sharpdraft.decode.session import Session
from sharpdraft.drafters.checkpoint import write
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.errors import SharpDraftError
from sharpdraft.hub.targets import load_target
from sharpdraft.lab.arms import AR, arms_of
from sharpdraft.lab.backends.groups import (
    Group,
    Prompt,
    fitting,
    groups_of,
    recorded_prompts,
    run_groups,
)
from sharpdraft.lab.backends.vllm import (
    Engine,
    asked_for,
    drafts_of,
    refusal,
    speculative_config,
)
from sharpdraft.lab.plan import Plan, measured
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
from support.drafters import drafter_config, drafter_tensors
from support.families import eagle_config, eagle_tensors, make_pard
from support.tiny import BLOCK, VOCAB, Tiny


def prompt_of(length: int, answer_tokens: int = 6) -> Prompt:
    return Prompt(f"p{length}", tuple(range(length)), answer_tokens)


def test_groups_hold_prompts_of_one_bucket() -> None:
    lengths = [10, 600, 12, 512, 513, 1024, 1025, 40_000, 8193]
    groups = groups_of([prompt_of(n, n) for n in lengths], 2)
    found = [[len(prompt.tokens) for prompt in group.prompts] for group in groups]
    assert found == [[10, 12], [512], [600, 513], [1024], [1025], [8193], [40_000]]
    assert [group.name for group in groups[:3]] == ["p10+p12", "p512", "p600+p513"]
    assert [group.answer_tokens for group in groups[:3]] == [12, 512, 600]
    assert sorted(n for group in found for n in group) == sorted(lengths)


def test_prompts_that_do_not_fit_are_told() -> None:
    fit, rows = fitting([prompt_of(n) for n in (10, 60, 62, 63, 900)], 64)
    assert [(p.name, p.answer_tokens) for p in fit] == [("p10", 6), ("p60", 4), ("p62", 2)]
    assert [(row["session"], row["context"]) for row in rows] == [("p63", 63), ("p900", 900)]
    assert {row["skipped"]["kind"] for row in rows} == {
        "no room for an answer in the target's context of 64 tokens"
    }


def test_recorded_prompts_are_the_labs_turns() -> None:
    recording = Recording("r", tuple(range(64)), (Turn(0, 2, 40), Turn(40, 44, 64)))
    plan = Plan("t", "d", (AR,), (), 1)
    assert recorded_prompts([recording], plan, 64) == [Prompt("r-0", (0, 1), 38)]


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
        self,
        log: list[str],
        name: str,
        accepted: int,
        wrong_at: int | None = None,
        longest: int = 99_999,
    ) -> None:
        self.log, self.name, self.accepted, self.wrong_at = log, name, accepted, wrong_at
        self.longest = longest

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[int] = ()
    ) -> dict[str, Any]:
        self.log.append(self.name)
        if max(map(len, prompts)) > self.longest:
            raise SharpDraftError("too long")
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
    groups = [
        Group((Prompt(f"a{i}", (1,) * 10, 6), Prompt(f"b{i}", (2,) * 12, 6))) for i in range(4)
    ]
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
    # All text is one token over and over: nothing in it is new.
    assert {row["arms"]["frozen"]["new"] for row in rows} == {"0" * 6}
    assert rows[0]["repetition"] == {
        "positions": 10,
        "seen": 10,
        "accepted": 2 * (5 + 4 + 3 + 2 + 1),
        "rounds": 2,
        "walked": 2 * 4,
    }
    cells = {cell.arm: cell for cell in summarise(json.loads(json.dumps(rows)))}
    assert cells["frozen"].mal and cells["frozen"].mal.value == 2.0
    assert cells["sharpdraft"].mal and cells["sharpdraft"].mal.value == 3.0
    assert cells["sharpdraft"].speedup and cells["sharpdraft"].speedup.value == 1.0
    assert cells["ar"].speed and cells["ar"].speed.value == 6.0
    again: list[dict[str, Any]] = []
    run_groups(groups, backends, (), rows[:3], again.append)
    assert [row["session"] for row in again] == ["a3+b3"]


def test_a_difference_is_told() -> None:
    rows: list[dict[str, Any]] = []
    log: list[str] = []
    backends = {"ar": Scripted(log, "ar", 0), "frozen": Scripted(log, "frozen", 1, wrong_at=4)}
    group = Group((Prompt("a", (1,), 6), Prompt("b", (2,), 6)))
    run_groups([group], backends, (), [], rows.append)
    assert rows[0]["differences"] == {"frozen": {"request": 1, "at": 4}}


def test_a_prompt_that_is_refused_is_skipped_alone() -> None:
    log: list[str] = []
    arms = {"ar": Scripted(log, "ar", 0), "frozen": Scripted(log, "frozen", 1, longest=99)}
    groups = groups_of([prompt_of(n) for n in (5, 100, 7, 9, 1000)], 3)
    rows: list[dict[str, Any]] = []
    run_groups(groups, arms, (), [], rows.append)
    assert [row["session"] for row in rows] == ["p5", "p100", "p7", "p9", "p1000"]
    failed = {row["session"]: row["skipped"] for row in rows if "skipped" in row}
    refused = {"kind": "failed", "reason": "frozen: too long"}
    assert failed == {"p100": refused, "p1000": refused}
    assert [row["requests"] for row in measured(rows)] == [1, 1, 1]
    # Resumed where nothing has changed, and where the engine takes more.
    kept, again = measured(rows), list[dict[str, Any]]()
    run_groups(groups, arms, (), kept, again.append)
    assert [row["session"] for row in again] == ["p100", "p1000"] and measured(again) == []
    arms["frozen"].longest = 1000
    run_groups(groups, arms, (), kept, kept.append)
    assert sorted(row["session"] for row in kept) == ["p100", "p1000", "p5", "p7", "p9"]
    assert sum(cell.turns for cell in summarise(kept) if cell.arm == "ar") == 5


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


_CHILD = """
import json, sys
sys.stdin.readline()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    longest = max(map(len, json.loads(line)["prompts"]))
    if longest == 3:
        print(json.dumps({"error": "no memory", "ended": True}), flush=True)
    if longest > 2:
        sys.exit(7)
    print(json.dumps({"tokens": longest}), flush=True)
"""


def test_an_engine_that_ended_over_a_prompt_is_started_anew(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(_CHILD)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{tmp_path}/child.py'\n")
    python.chmod(0o755)
    with closing(Engine(tmp_path, None, 5, None, python=str(python))) as engine:
        assert engine.answer([[1]], 4) == {"tokens": 1}
        first = engine.child.pid
        assert engine.answer([[1, 2]], 4) == {"tokens": 2} and engine.child.pid == first
        for prompt, message in (([1] * 4, "ended with exit code 7"), ([1] * 3, "no memory")):
            with pytest.raises(SharpDraftError, match=message):
                engine.answer([prompt], 4)
            assert engine.answer([[1, 2]], 4) == {"tokens": 2}
        assert engine.child.pid != first
    assert engine.child.poll() is not None


def test_what_does_not_fit_into_an_engine_is_refused_by_it() -> None:
    """Before anything of the group is asked, so that the engine goes on."""
    scheduler = SimpleNamespace(max_model_len=8)
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace()))
    engine.engine_core.engine_core.scheduler = scheduler
    assert refusal(engine, {"prompts": [[1] * 7, [2]]}) is None
    assert refusal(engine, {"prompts": [[1], [2] * 8]}) == {
        "error": "a prompt of 8 tokens does not fit: max_model_len is 8"
    }


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    # What config.json has, how it names a number, the number without, and the most.
    "dflash": (drafter_config(), {"block_size": 4}, BLOCK - 1, 3),
    "eagle3": (
        eagle_config(),
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 40}]}},
        5,
        32,
    ),
    "pard": ({"pard_token": VOCAB - 1}, {"num_drafts": 40}, 7, 32),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_drafts_as_in_the_labs_loop_in_every_family(
    llama: Tiny, tmp_path: Path, family: str
) -> None:
    config, named, unnamed_drafts, named_drafts = FAMILIES[family]
    frozen, short = arms_of(["frozen", "frozen+drafts@2"], {"": DraftSettings()})
    for own, expected in (({}, unnamed_drafts), (named, named_drafts)):
        folder = tmp_path / str(expected)
        write_drafter(folder, family, config | own, llama)
        session = Session(llama.target, load_drafter(folder, llama.target))
        for arm, count in ((frozen, expected), (short, 2)):
            session.use(arm)
            drafts = drafts_of(arm, folder)
            assert drafts == session.num_drafts == count
            told = speculative_config(folder, drafts)
            assert told["num_speculative_tokens"] == count


def write_drafter(folder: Path, family: str, config: dict[str, Any], tiny: Tiny) -> None:
    if family == "pard":
        make_pard().save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    elif family == "eagle3":
        write(folder, config, eagle_tensors(config, tiny.target))
    else:
        write(folder, config, drafter_tensors(config))
