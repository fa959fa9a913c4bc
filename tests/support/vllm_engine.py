"""A tiny target and drafters for vLLM itself."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sharpdraft.decode.session import Session
from sharpdraft.drafters import load_drafter
from sharpdraft.lab.backends.vllm import Engine
from sharpdraft.method.policies import FixedSlope
from sharpdraft.method.scale import Policy, policy_to_settings
from sharpdraft.method.settings import FROZEN
from sharpdraft.model.causal_lm import CausalLM

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


Start = Callable[..., AbstractContextManager[Engine]]


def asked(policy: Policy | None) -> object:
    return FROZEN if policy is None else policy_to_settings(policy)


def ours(
    models: Models,
    prompts: Sequence[Sequence[int]],
    policy: Policy | None,
    drafter: Path | None = None,
) -> list[list[tuple[int, int, int]]]:
    """Rounds of our own loop."""
    target = CausalLM.of(models.model)
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


def _edges() -> list[tuple[int, str]]:
    return [(0, "0-512"), (512, "512-1024")]
