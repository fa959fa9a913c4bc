"""vLLM itself with the plugin, on a tiny target and drafter: tokens, rounds and counters, against our own loop.

Needs vLLM in this environment (`make test-vllm` makes one); each engine takes some seconds to start. The drafter is
random, and the policy as steep as it can be, so that a count that is off by one shows in what is drafted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import drafter_config, drafter_tensors
from sharpdraft.decode.loop import Session
from sharpdraft.drafters.dflash import DFlash, save
from sharpdraft.lab.vllm_arm import Engine
from sharpdraft.scale import FixedSlope, Policy, policy_to_settings
from sharpdraft.settings import FROZEN
from sharpdraft.target import Target

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]

POSITIONS, VOCAB, DRAFTS, NEW = 1024, 64, 5, 60
STEEP = FixedSlope(3, slope=0.5, top_k=2, max_scale=50.0)
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": POSITIONS,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
}
LENGTHS = (5, 17, 40, 64, 130, 300, 511, 900)


@dataclass(frozen=True)
class Models:
    target: Path
    drafter: Path
    model: Any


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        model.lm_head.weight[:10] *= 0.1
        model.lm_head.weight[15:] *= 0.1
        model.lm_head.weight[10] *= 2
    model.save_pretrained(folder / "target")
    config = drafter_config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        rope_theta=10000.0,
    )
    tensors = drafter_tensors(config)
    # vLLM 0.32 on CPU norms every layer's context Keys with the first layer's weights; with one weight for all, what
    # it computes is what the drafter is. `test_grouped_norm_on_cpu` says when that is no longer needed.
    for name in tensors:
        if name.endswith("k_norm.weight"):
            tensors[name] = tensors["layers.0.self_attn.k_norm.weight"]
    save(folder / "drafter", config, {name: tensor.clone() for name, tensor in tensors.items()})
    return Models(folder / "target", folder / "drafter", model)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCAB, (n,), generator=rng).tolist() for n in LENGTHS]


Start = Callable[..., Engine]


@pytest.fixture(scope="session")
def start(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Engines by what they are asked, each started once."""
    started: dict[str, Engine] = {}
    logs = tmp_path_factory.mktemp("logs")

    def call(asked: object, drafter: bool = True, **options: Any) -> Engine:
        key = json.dumps([asked, drafter, options], sort_keys=True)
        if key not in started:
            log = logs / f"{len(started)}.log"
            used = models.drafter if drafter else None
            started[key] = Engine(models.target, used, DRAFTS, asked, {**OPTIONS, **options}, log)
        return started[key]

    yield call
    for engine in started.values():
        engine.close()


@pytest.fixture(scope="session")
def ar(start: Start, prompts: list[list[int]]) -> dict[str, Any]:
    return start(None, drafter=False).answer(prompts, NEW)


def asked(policy: Policy | None) -> object:
    return FROZEN if policy is None else policy_to_settings(policy)


def ours(models: Models, prompts: Sequence[Sequence[int]], policy: Policy | None) -> list[list[tuple[int, int, int]]]:
    """Rounds of our own loop."""
    target = Target(models.model)
    session = Session(target, DFlash.load(models.drafter, target), policy)
    found = []
    for prompt in prompts:
        session.rewind(0)
        found.append([(r.context, r.drafted, r.accepted) for r in session.generate(prompt, NEW)][1:])
    return found


def different_rounds(theirs: Sequence[Sequence[Sequence[int]]], own: Sequence[Sequence[tuple[int, int, int]]]) -> int:
    """Rounds that differ, of those in which we draft a whole block: at the end of an answer vLLM drafts on, while we
    draft what is still wanted."""
    differ = total = 0
    for engine, loop in zip(theirs, own, strict=True):
        whole = [r for r in loop if r[1] == DRAFTS]
        total += len(whole)
        differ += sum(tuple(a) != b for a, b in zip(engine, whole, strict=False))
    assert total > 100
    return differ


@pytest.mark.parametrize("policy", [None, STEEP, FixedSlope(64, top_k=8)], ids=["frozen", "steep", "sharpdraft"])
def test_tokens_are_the_targets_and_rounds_are_our_loops(
    start: Start, ar: dict[str, Any], models: Models, prompts: list[list[int]], policy: Policy | None
) -> None:
    engine = start(asked(policy))
    alone = [engine.answer([prompt], NEW) for prompt in prompts]
    together = engine.answer(prompts, NEW)
    assert [a["tokens"][0] for a in alone] == ar["tokens"]
    assert together["tokens"] == ar["tokens"]
    own = ours(models, prompts, policy)
    assert different_rounds([a["rounds"][0] for a in alone], own) == 0
    assert different_rounds(together["rounds"], own) == 0
    assert sum(r[2] for rounds in own for r in rounds) > 20, "a drafter that is never right shows nothing"


def test_a_count_that_is_off_by_one_is_noticed(
    models: Models, prompts: list[list[int]], ar: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would say of a plugin that counts one Key too many."""
    (tmp_path / "sitecustomize.py").write_text(
        "from sharpdraft.engines.imports import when_imported\n"
        "def plant(module):\n"
        "    right = module.ragged_keys\n"
        "    module.ragged_keys = lambda *a, **k: right(*a, **k) + 1\n"
        "when_imported('sharpdraft.engines.vllm', plant)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    engine = Engine(models.target, models.drafter, DRAFTS, asked(STEEP), OPTIONS, tmp_path / "log")
    try:
        answer = engine.answer(prompts, NEW)
    finally:
        engine.close()
    assert answer["tokens"] == ar["tokens"], "wrong counts cost acceptance, never tokens"
    assert different_rounds(answer["rounds"], ours(models, prompts, STEEP)) > 0


def test_below_the_reference_it_is_stock_vllm(start: Start, prompts: list[list[int]]) -> None:
    stock = start(None).answer(prompts, NEW)
    assert start(asked(FixedSlope(10**6))).answer(prompts, NEW)["rounds"] == stock["rounds"]
    assert start(asked(STEEP)).answer(prompts, NEW)["rounds"] != stock["rounds"]


@pytest.mark.parametrize(
    "options",
    [{"enable_prefix_caching": True}, {"max_num_batched_tokens": 96}, {"num_gpu_blocks_override": 36}],
    ids=["prefix caching", "chunked prefill", "preemption"],
)
def test_acceptance_survives_what_a_server_does(
    start: Start, ar: dict[str, Any], models: Models, prompts: list[list[int]], options: Mapping[str, Any]
) -> None:
    """Twice, so that the second time finds the first one's prefixes."""
    engine = start(asked(STEEP), **options)
    own = ours(models, prompts, STEEP)
    for _ in range(2):
        answer = engine.answer(prompts, NEW)
        assert answer["tokens"] == ar["tokens"]
        accepted = sum(r[2] for rounds in answer["rounds"] for r in rounds)
        assert accepted == pytest.approx(sum(r[2] for rounds in own for r in rounds), rel=0.1)


def test_wrong_settings_end_it_before_a_weight_is_read(models: Models, tmp_path: Path) -> None:
    from sharpdraft.errors import SharpDraftError

    for wrong, message in (({"reference": 3, "top_k": 5}, "above top_k"), (True, "no sharpdraft.json")):
        with pytest.raises(SharpDraftError, match=message):
            Engine(models.target, models.drafter, DRAFTS, wrong, OPTIONS, tmp_path / "log")


# The server


@pytest.fixture(scope="session")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """`vllm serve` with several processes, as people run it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    speculative = {"method": "dflash", "model": str(models.drafter), "num_speculative_tokens": DRAFTS}
    line = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(models.target), "--port", str(port)]
    line += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(POSITIONS), "--skip-tokenizer-init"]
    line += ["--speculative-config", json.dumps(speculative), "--max-num-seqs", "8"]
    line += ["--additional-config", json.dumps({"sharpdraft": asked(STEEP)})]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    url = f"http://127.0.0.1:{port}"
    with open(log, "wb") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output, env=environment)
    try:
        for _ in range(240):
            if process.poll() is not None:
                raise RuntimeError(log.read_text()[-3000:])
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except OSError:
                time.sleep(1)
        yield url, log
    finally:
        process.terminate()
        process.wait(30)


def complete(url: str, prompt: Sequence[int], count: int, abort_after: int | None = None) -> None:
    body = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "stream": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for number, _ in enumerate(response):
            if abort_after is not None and number >= abort_after:
                return


def by_context(url: str) -> dict[tuple[str, str], float]:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    found = {}
    for line in text.splitlines():
        if line.startswith("vllm:spec_decode_num_") and "_by_context_total{" in line:
            name = line.split("num_")[1].split("_by_context")[0]
            context = line.split('context="')[1].split('"')[0]
            found[name, context] = float(line.rsplit(" ", 1)[1])
    return found


def test_a_server_says_what_it_scales_and_counts_by_context(
    server: tuple[str, Path], prompts: list[list[int]], models: Models
) -> None:
    url, log = server
    assert "Queries of 2 draft layers are scaled by the Keys they see" in log.read_text()
    threads = [threading.Thread(target=complete, args=(url, prompt, NEW)) for prompt in prompts]
    threads += [threading.Thread(target=complete, args=(url, prompts[4], NEW, 3)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = by_context(url)
    own = ours(models, prompts, STEEP)
    drafts = {edge: sum(low < r[0] <= low + 512 for rounds in own for r in rounds) for low, edge in _edges()}
    for _, edge in _edges():
        assert counts["drafts", edge] >= drafts[edge] > 0
        assert counts["draft_tokens", edge] == DRAFTS * counts["drafts", edge]
        assert 0 < counts["accepted_tokens", edge] < counts["draft_tokens", edge]


def _edges() -> list[tuple[int, str]]:
    return [(0, "0-512"), (512, "512-1024")]
