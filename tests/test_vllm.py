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
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import drafter_config, drafter_tensors, make_model
from sharpdraft.decode.session import Session
from sharpdraft.drafters import load_drafter
from sharpdraft.drafters.dflash import save
from sharpdraft.lab.backends.vllm import Engine
from sharpdraft.method.policies import FixedSlope
from sharpdraft.method.scale import Policy, policy_to_settings
from sharpdraft.method.settings import FROZEN
from sharpdraft.model.causal_lm import CausalLM

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
    ),
]

POSITIONS, VOCAB, DRAFTS, NEW = 1024, 192, 5, 60
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
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    }
    longer = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "initializer_range": 0.3}
    model = make_model("llama", head_dim=32, **sizes, **longer)
    model.save_pretrained(folder / "target")
    config = drafter_config(
        vocab_size=VOCAB,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        rope_theta=10000.0,
        **sizes,
    )
    tensors = drafter_tensors(config)
    # vLLM 0.32 on CPU norms every layer's context Keys with the first layer's weights; with one
    # weight for all, what it computes is what the drafter is. The log's warning, looked for below,
    # says when that is no longer needed.
    for name in tensors:
        if name.endswith("k_norm.weight"):
            tensors[name] = tensors["layers.0.self_attn.k_norm.weight"]
    save(folder / "drafter", config, {name: tensor.clone() for name, tensor in tensors.items()})
    return Models(folder / "target", folder / "drafter", model)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCAB, (n,), generator=rng).tolist() for n in LENGTHS]


Start = Callable[..., AbstractContextManager[Engine]]


@pytest.fixture(scope="session")
def start(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """One engine at a time: each takes gigabytes."""
    logs = tmp_path_factory.mktemp("logs")

    def call(asked: object, drafter: bool = True, **options: Any) -> AbstractContextManager[Engine]:
        log = logs / f"{len(list(logs.iterdir()))}.log"
        used = models.drafter if drafter else None
        return closing(Engine(models.target, used, DRAFTS, asked, {**OPTIONS, **options}, log))

    return call


@pytest.fixture(scope="session")
def ar(start: Start, prompts: list[list[int]]) -> dict[str, Any]:
    with start(None, drafter=False) as engine:
        return engine.answer(prompts, NEW)


def asked(policy: Policy | None) -> object:
    return FROZEN if policy is None else policy_to_settings(policy)


def ours(
    models: Models,
    prompts: Sequence[Sequence[int]],
    policy: Policy | None,
    drafter: Path | None = None,
) -> list[list[tuple[int, int, int]]]:
    """Rounds of our own loop."""
    target = CausalLM(models.model)
    session = Session(
        target, load_drafter(drafter or models.drafter, target), policy, block=DRAFTS + 1
    )
    found = []
    for prompt in prompts:
        session.rewind(0)
        found.append(
            [(r.context, r.drafted, r.accepted) for r in session.generate(prompt, NEW)][1:]
        )
    return found


def different_rounds(
    theirs: Sequence[Sequence[Sequence[int]]], own: Sequence[Sequence[tuple[int, int, int]]]
) -> int:
    """Rounds that differ, of those in which we draft a whole block: at the end of an answer vLLM
    drafts on, while we draft what is still wanted."""
    differ = total = 0
    for engine, loop in zip(theirs, own, strict=True):
        whole = [r for r in loop if r[1] == DRAFTS]
        total += len(whole)
        differ += sum(tuple(a) != b for a, b in zip(engine, whole, strict=False))
    assert total > 100
    return differ


@pytest.mark.parametrize(
    "policy", [None, STEEP, FixedSlope(64, top_k=8)], ids=["frozen", "steep", "sharpdraft"]
)
def test_tokens_are_the_targets_and_rounds_are_our_loops(
    start: Start,
    ar: dict[str, Any],
    models: Models,
    prompts: list[list[int]],
    policy: Policy | None,
) -> None:
    with start(asked(policy)) as engine:
        alone = [engine.answer([prompt], NEW) for prompt in prompts]
        together = engine.answer(prompts, NEW)
    assert [a["tokens"][0] for a in alone] == ar["tokens"]
    assert together["tokens"] == ar["tokens"]
    own = ours(models, prompts, policy)
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
    policy = FixedSlope(20, slope=2.0, top_k=19, max_scale=500.0)
    rng = torch.Generator().manual_seed(2)
    short = [torch.randint(0, VOCAB, (n,), generator=rng).tolist() for n in range(5, 20, 2)]
    with start(asked(policy)) as engine:
        right = engine.answer(short, NEW)
    (tmp_path / "sitecustomize.py").write_text(
        "from sharpdraft.adapters.imports import when_imported\n"
        "def plant(module):\n"
        "    right = module.ragged_keys\n"
        "    module.ragged_keys = lambda *a, **k: right(*a, **k) + 1\n"
        "when_imported('sharpdraft.adapters.vllm.register', plant)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with start(asked(policy)) as engine:
        wrong = engine.answer(short, NEW)
    assert wrong["tokens"] == right["tokens"], "wrong counts cost acceptance, never tokens"
    own = ours(models, short, policy)
    assert different_rounds(right["rounds"], own) == 0 < different_rounds(wrong["rounds"], own)


def test_below_the_reference_it_is_stock_vllm(start: Start, prompts: list[list[int]]) -> None:
    rounds = []
    for each in (None, asked(FixedSlope(10**6)), asked(STEEP)):
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
from sharpdraft.adapters.imports import when_imported

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

when_imported("sharpdraft.adapters.vllm.register", counts)
when_imported("vllm.v1.spec_decode.llm_base_proposer", positions)
"""


def eagle3(models: Models, folder: Path, **changes: Any) -> Path:
    """A random EAGLE-3 drafter in SafeAILab's layout."""
    from safetensors.torch import save_file

    size, inner, heads, kv = 96, 96, 6 * 32, 3 * 32
    shapes = {
        "fc.weight": (size, 3 * size),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, heads),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "lm_head.weight": (VOCAB, size),
    }
    rng = torch.Generator().manual_seed(3)
    tensors = {name: 0.3 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    for name in (
        "norm",
        "midlayer.hidden_norm",
        "midlayer.input_layernorm",
        "midlayer.post_attention_layernorm",
    ):
        tensors[f"{name}.weight"] = torch.ones(size)
    tensors["lm_head.weight"] = models.model.lm_head.weight.detach().clone()
    config = json.loads((models.target / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB,
    }
    config |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], **changes}
    if config.get("fc_norm"):
        tensors |= {
            f"fc_norm.{i}.weight": 1 + 0.2 * torch.randn(size, generator=rng) for i in range(3)
        }
    folder.mkdir()
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pard(models: Models, folder: Path) -> Path:
    """A random draft LM that takes mask tokens."""
    torch.manual_seed(5)
    config = models.model.config.to_dict() | {"num_hidden_layers": 2, "pard_token": VOCAB - 1}
    model: Any = LlamaForCausalLM(LlamaConfig(**config)).eval()
    with torch.no_grad():
        model.lm_head.weight.copy_(models.model.lm_head.weight)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("policy", [None, STEEP], ids=["frozen", "steep"])
@pytest.mark.parametrize("kind", ["eagle 3", "eagle 3.1", "pard"])
def test_other_families_have_our_loops_rounds(
    kind: str,
    policy: Policy | None,
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
        Engine(models.target, drafter, DRAFTS, asked(policy), OPTIONS, tmp_path / "log")
    ) as engine:
        answer = engine.answer(prompts, NEW)
    assert answer["tokens"] == ar["tokens"]
    own = ours(models, prompts, policy, drafter)
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
    ):
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
    speculative = {
        "method": "dflash",
        "model": str(models.drafter),
        "num_speculative_tokens": DRAFTS,
    }
    # `vllm serve` asks for a distribution named vllm, which vllm-cpu is not.
    line = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(models.target),
    ]
    line += ["--port", str(port)]
    line += [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        str(POSITIONS),
        "--skip-tokenizer-init",
    ]
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
    body = {
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
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
    assert "with the first layer's weights" in log.read_text()
    threads = [threading.Thread(target=complete, args=(url, prompt, NEW)) for prompt in prompts]
    threads += [threading.Thread(target=complete, args=(url, prompts[4], NEW, 3)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = by_context(url)
    own = ours(models, prompts, STEEP)
    drafts = {
        edge: sum(low < r[0] <= low + 512 for rounds in own for r in rounds)
        for low, edge in _edges()
    }
    for _, edge in _edges():
        assert counts["drafts", edge] >= drafts[edge] > 0
        assert counts["draft_tokens", edge] == DRAFTS * counts["drafts", edge]
        assert 0 < counts["accepted_tokens", edge] < counts["draft_tokens", edge]


def _edges() -> list[tuple[int, str]]:
    return [(0, "0-512"), (512, "512-1024")]
