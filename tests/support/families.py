"""EAGLE-3 and PARD drafters for the tiny targets, and one of every family by its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sharpdraft.drafters.eagle3 import Eagle3
from sharpdraft.drafters.pard import Pard
from sharpdraft.model.causal_lm import CausalLM
from support.drafters import make_drafter
from support.tiny import POSITIONS, VOCAB, Tiny

SIZE, INNER, HEADS, KV, DIM = 32, 48, 4, 2, 8
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle 3": {},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "normed residual, norm before fusion": {
        "norm_before_residual": True,
        "eagle_config": {"norm_before_fc": True},
    },
    "reduced vocabulary": {"draft_vocab_size": 40},
}


def eagle_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "draft_vocab_size": VOCAB,
    } | changes


def eagle_tensors(config: dict[str, Any], target: CausalLM, seed: int = 3) -> dict[str, Tensor]:
    """Random weights under the published names, norms too; the head is the target's, so that some
    guesses are right."""
    rng = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return 0.35 * torch.randn(shape, generator=rng)

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=rng)

    count = config["draft_vocab_size"]
    kept = torch.arange(VOCAB)[5 : 5 + count] if count < VOCAB else torch.arange(VOCAB)
    attn, mlp = "midlayer.self_attn", "midlayer.mlp"
    tensors = {
        "fc.weight": matrix(SIZE, 3 * SIZE),
        f"{attn}.q_proj.weight": matrix(HEADS * DIM, 2 * SIZE),
        f"{attn}.k_proj.weight": matrix(KV * DIM, 2 * SIZE),
        f"{attn}.v_proj.weight": matrix(KV * DIM, 2 * SIZE),
        f"{attn}.o_proj.weight": matrix(SIZE, HEADS * DIM),
        f"{mlp}.gate_proj.weight": matrix(INNER, SIZE),
        f"{mlp}.up_proj.weight": matrix(INNER, SIZE),
        f"{mlp}.down_proj.weight": matrix(SIZE, INNER),
        "norm.weight": norm(SIZE),
        "midlayer.input_layernorm.weight": norm(SIZE),
        "midlayer.hidden_norm.weight": norm(SIZE),
        "midlayer.post_attention_layernorm.weight": norm(SIZE),
        "lm_head.weight": target.head.weight[kept].clone(),
    }
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(SIZE) for i in range(3)}
    if (config.get("eagle_config") or {}).get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(3 * SIZE)
    if count < VOCAB:
        tensors["d2t"] = kept - torch.arange(count)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
    return tensors


def make_pard(seed: int = 0, vocab: int = VOCAB, positions: int = 512) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=SIZE,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        max_position_embeddings=positions,
        initializer_range=0.4,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def pard_of(tiny: Tiny, seed: int = 0) -> tuple[Pard, LlamaForCausalLM]:
    model = make_pard(seed)
    with torch.no_grad():
        model.lm_head.weight.copy_(tiny.model.lm_head.weight)
    return Pard(CausalLM.of(model), VOCAB - 1, tiny.target), model


def drafter_of(kind: str, tiny: Tiny) -> Any:
    if kind == "none":
        return None
    if kind.startswith("dflash"):
        window = {
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
        }
        changes: dict[str, dict[str, Any]] = {
            "dflash, causal": {"is_causal": True},
            "dflash, window": {**window, "sliding_window": 24, "max_window_layers": 1},
        }
        return make_drafter(tiny.target, **changes.get(kind, {}))
    if kind == "pard":
        return pard_of(tiny)[0]
    config = eagle_config(**(list(VARIANTS.values())[-1] if "variant" in kind else {}))
    return Eagle3(config, eagle_tensors(config, tiny.target), tiny.target)
