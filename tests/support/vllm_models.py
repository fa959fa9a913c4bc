"""A tiny target and drafters that vLLM can load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sharpdraft.drafters.dflash import save
from support.drafters import drafter_config, drafter_tensors
from support.tiny import make_model

POSITIONS, VOCAB = 1024, 192


@dataclass(frozen=True)
class Models:
    target: Path
    drafter: Path
    model: Any


def save_models(folder: Path) -> Models:
    """A target and a DFlash drafter of two layers."""
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
