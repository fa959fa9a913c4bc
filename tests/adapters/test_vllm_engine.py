"""vLLM itself with the plugin, on a tiny target and drafter: tokens, rounds and counters, against
our own loop.

Needs vLLM in this environment (`make test-vllm` makes one); each engine takes some seconds to
start. The drafter is random, and the policy as steep as it can be, so that a count that is off by
one shows in what is drafted.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpdraft.decode.session import Arm
from sharpdraft.lab.backends.vllm import Engine
from sharpdraft.method.policies import FixedSlope
from sharpdraft.method.settings import DraftSettings, Window
from support.vllm_engine import (
    DRAFTS,
    NEW,
    OPTIONS,
    RELEASED,
    STEEP,
    Start,
    asked,
    different_rounds,
    ours,
)
from support.vllm_models import VOCAB, Models, eagle3, pard

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
    ),
]


@pytest.mark.parametrize(
    "settings",
    [
        RELEASED,
        STEEP,
        DraftSettings(FixedSlope(64, top_k=8)),
        DraftSettings(view=Window(48)),
        DraftSettings(STEEP.scale, Window(48)),
    ],
    ids=["frozen", "steep", "sharpdraft", "window", "window and steep"],
)
def test_tokens_are_the_targets_and_rounds_are_our_loops(
    start: Start,
    ar: dict[str, Any],
    models: Models,
    prompts: list[list[int]],
    settings: DraftSettings,
) -> None:
    with start(asked(settings)) as engine:
        alone = [engine.answer([prompt], NEW) for prompt in prompts]
        together = engine.answer(prompts, NEW)
    assert [a["tokens"][0] for a in alone] == ar["tokens"]
    assert together["tokens"] == ar["tokens"]
    own = ours(models, prompts, settings)
    assert different_rounds([a["rounds"][0] for a in alone], own) == 0
    assert different_rounds(together["rounds"], own) == 0
    assert sum(r[2] for rounds in own for r in rounds) > 20, (
        "a drafter that is never right shows nothing"
    )


def test_a_count_that_is_off_by_one_is_noticed(
    start: Start, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would say of a plugin that counts one Key too many, just above N0, where
    that is much."""
    settings = DraftSettings(FixedSlope(20, slope=2.0, top_k=19, max_scale=500.0))
    rng = torch.Generator().manual_seed(2)
    short = [torch.randint(0, VOCAB, (n,), generator=rng).tolist() for n in range(5, 20, 2)]
    with start(asked(settings)) as engine:
        right = engine.answer(short, NEW)
    (tmp_path / "sitecustomize.py").write_text(
        "from sharpdraft.adapters.hooks import when_imported\n"
        "def plant(module):\n"
        "    right = module.ragged_keys\n"
        "    module.ragged_keys = lambda *a, **k: right(*a, **k) + 1\n"
        "when_imported('sharpdraft.adapters.vllm.layers', plant)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with start(asked(settings)) as engine:
        wrong = engine.answer(short, NEW)
    assert wrong["tokens"] == right["tokens"], "wrong counts cost acceptance, never tokens"
    own = ours(models, short, settings)
    assert different_rounds(right["rounds"], own) == 0 < different_rounds(wrong["rounds"], own)


def test_below_the_reference_it_is_stock_vllm(start: Start, prompts: list[list[int]]) -> None:
    rounds = []
    for each in (None, asked(DraftSettings(FixedSlope(10**6))), asked(STEEP)):
        with start(each) as engine:
            rounds.append(engine.answer(prompts, NEW)["rounds"])
    stock, idle, acting = rounds
    assert idle == stock != acting


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 96},
        # Seven of the eight prompts fit, and then grow.
        {"block_size": 32, "num_gpu_blocks_override": 45},
    ],
    ids=["prefix caching", "chunked prefill", "preemption"],
)
def test_acceptance_survives_what_a_server_does(
    start: Start,
    ar: dict[str, Any],
    models: Models,
    prompts: list[list[int]],
    options: Mapping[str, Any],
) -> None:
    """Twice, so that the second time finds the first one's prefixes."""
    own = ours(models, prompts, STEEP)
    with start(asked(STEEP), **options) as engine:
        answers = [engine.answer(prompts, NEW) for _ in range(2)]
    assert (answers[-1]["preemptions"] > 0) == ("block_size" in options)
    for answer in answers:
        assert answer["tokens"] == ar["tokens"]
        accepted = sum(r[2] for rounds in answer["rounds"] for r in rounds)
        assert accepted == pytest.approx(sum(r[2] for rounds in own for r in rounds), rel=0.1)


PROBE = """
import json
from sharpdraft.adapters.hooks import when_imported

counted = []

def counts(module):
    right = module.ragged_keys
    def probed(*args, **kwargs):
        keys = right(*args, **kwargs)
        counted.append(keys.tolist())
        return keys
    module.ragged_keys = probed

def positions(module):
    load = module.SpecDecodeBaseProposer.load_model
    def probed(self, *args, **kwargs):
        load(self, *args, **kwargs)
        def before(model, given, named):
            counted.clear()
            self.probed_positions = named["positions"].tolist()
        def after(model, given, result):
            with open({out!r}, "a") as out:
                out.write(json.dumps([self.probed_positions, *counted]) + "\\n")
        self.model.register_forward_pre_hook(before, with_kwargs=True)
        self.model.register_forward_hook(after)
    module.SpecDecodeBaseProposer.load_model = probed

when_imported("sharpdraft.adapters.vllm.layers", counts)
when_imported("vllm.v1.spec_decode.llm_base_proposer", positions)
"""


@pytest.mark.parametrize(
    "settings",
    [RELEASED, STEEP, DraftSettings(STEEP.scale, Window(48))],
    ids=["frozen", "steep", "window and steep"],
)
@pytest.mark.parametrize("kind", ["eagle 3", "eagle 3.1", "pard"])
def test_other_families_have_our_loops_rounds(
    kind: str,
    settings: DraftSettings,
    ar: dict[str, Any],
    models: Models,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    if kind == "pard":
        drafter = pard(models, tmp_path / "drafter")
    else:
        changes = {"fc_norm": True, "norm_output": True} if kind == "eagle 3.1" else {}
        drafter = eagle3(models, tmp_path / "drafter", **changes)
    with closing(
        Engine(models.target, drafter, DRAFTS, asked(settings), OPTIONS, tmp_path / "log")
    ) as engine:
        answer = engine.answer(prompts, NEW)
    assert answer["tokens"] == ar["tokens"]
    own = ours(models, prompts, settings, drafter)
    assert different_rounds(answer["rounds"], own) == 0
    assert sum(r[2] for rounds in own for r in rounds) > 20


@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_every_step_of_a_sequential_drafter_is_counted(
    kind: str,
    models: Models,
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Metadata is updated in place between the steps; a causal row at position p sees p + 1
    Keys."""
    out = tmp_path / "counts"
    (tmp_path / "sitecustomize.py").write_text(PROBE.format(out=str(out)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    drafter = models.target if kind == "draft_model" else eagle3(models, tmp_path / "eagle3")
    speculative = {"method": kind, "model": str(drafter), "num_speculative_tokens": 3}
    options = {**OPTIONS, "speculative_config": speculative}
    with closing(Engine(models.target, None, 3, asked(STEEP), options, tmp_path / "log")) as engine:
        engine.answer(prompts[:4], 12)
        engine.answer([prompts[6]], 12)
    rows = checked = single = 0
    for line in out.read_text().splitlines():
        positions, *counted = json.loads(line)
        for keys in counted:
            rows += 1
            # Rows of refused drafts stand at position 0, and what comes of them is thrown away.
            real = [(at, n) for at, n in zip(positions, keys, strict=True) if n and at]
            checked += len(real)
            single += len(keys) == 1
            assert all(n == at + 1 for at, n in real), line
    assert rows > 30 and single > 5 and checked > 600


def test_three_tensor_parallel_ranks(
    ar: dict[str, Any],
    models: Models,
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    options = {**OPTIONS, "tensor_parallel_size": 3, "distributed_executor_backend": "mp"}
    with closing(
        Engine(models.target, models.drafter, DRAFTS, asked(STEEP), options, tmp_path / "log")
    ) as engine:
        answer = engine.answer(prompts[:5], NEW)
    assert answer["tokens"] == ar["tokens"][:5]
    said = (tmp_path / "log").read_text()
    assert said.count("Queries of 2 draft layers are scaled by the Keys they see") == 3
    # Sums of three parts round otherwise, which a steep policy on a random drafter lets through to
    # a draft or two.
    accepted = sum(r[2] for rounds in answer["rounds"] for r in rounds)
    own = sum(r[2] for rounds in ours(models, prompts[:5], STEEP) for r in rounds)
    assert accepted == pytest.approx(own, rel=0.1)


def test_wrong_settings_end_it_before_a_weight_is_read(models: Models, tmp_path: Path) -> None:
    from sharpdraft.errors import SharpDraftError

    for wrong, message in (
        ({"reference": 3, "top_k": 5}, "above top_k"),
        (True, "no sharpdraft.json"),
        ("sinks@4+window@508", "leave sinks out"),
        ("slopes@64:slopes=3/5/7", "for 3 layers, and the drafter has 2"),
        ("drafts@4", f"length .drafts@4.*drafts {DRAFTS} tokens"),
    ):
        with pytest.raises(SharpDraftError, match=message):
            Engine(models.target, models.drafter, DRAFTS, wrong, OPTIONS, tmp_path / "log")


def test_vllms_own_lookup_is_an_arm(
    ar: dict[str, Any], models: Models, prompts: list[list[int]], tmp_path: Path
) -> None:
    """On text that repeats itself, as the tiny target's does, it accepts what it drafts."""
    with closing(Engine.of(Arm("", ""), models.target, None, OPTIONS, tmp_path / "log")) as engine:
        answer = engine.answer(prompts, NEW)
    assert answer["tokens"] == ar["tokens"]
    rounds = [each for own in answer["rounds"] for each in own]
    assert rounds and sum(accepted for _, _, accepted in rounds) > 0
    assert {drafted for _, drafted, _ in rounds} <= set(range(1, 8))
