"""Drafters that are not run, as their families publish them: names, config.json and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from support.drafters import drafter_config, drafter_tensors
from support.tiny import VOCAB

Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]

SIZE, INNER = 32, 48
LM: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
}


def layer(prefix: str, wide: int = 1) -> dict[str, Tensor]:
    """A Llama layer's; wide: how many hidden sizes its rows are wide."""
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return {
        f"{attn}.q_proj.weight": torch.ones(SIZE, wide * SIZE),
        f"{attn}.k_proj.weight": torch.ones(SIZE // 2, wide * SIZE),
        f"{attn}.v_proj.weight": torch.ones(SIZE // 2, wide * SIZE),
        f"{attn}.o_proj.weight": torch.ones(SIZE, SIZE),
        f"{mlp}.gate_proj.weight": torch.ones(INNER, SIZE),
        f"{mlp}.up_proj.weight": torch.ones(INNER, SIZE),
        f"{mlp}.down_proj.weight": torch.ones(SIZE, INNER),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(SIZE),
    }


def language_model(**changes: Any) -> Checkpoint:
    tensors = {f"model.{n}": t for n, t in layer("layers.0").items()} | {
        "model.embed_tokens.weight": torch.ones(VOCAB, SIZE),
        "model.layers.0.input_layernorm.weight": torch.ones(SIZE),
        "model.norm.weight": torch.ones(SIZE),
        "lm_head.weight": torch.ones(VOCAB, SIZE),
    }
    return LM | changes, tensors


def eagle1(**changes: Any) -> Checkpoint:
    """Of the first two EAGLEs: token and state are fused, no norm is before the layer."""
    tensors = layer("layers.0") | {
        "embed_tokens.weight": torch.ones(VOCAB, SIZE),
        "fc.weight": torch.ones(SIZE, 2 * SIZE),
        "fc.bias": torch.ones(SIZE),
    }
    return LM | changes, tensors


def medusa(prefix: str = "", **changes: Any) -> Checkpoint:
    tensors = {}
    for head in range(2):
        tensors[f"{prefix}{head}.0.linear.weight"] = torch.ones(SIZE, SIZE)
        tensors[f"{prefix}{head}.0.linear.bias"] = torch.ones(SIZE)
        tensors[f"{prefix}{head}.1.weight"] = torch.ones(VOCAB, SIZE)
    return {"medusa_num_heads": 2, "medusa_num_layers": 1, "vocab_size": VOCAB} | changes, tensors


def mlp_speculator(**changes: Any) -> Checkpoint:
    config = {
        "emb_dim": SIZE,
        "inner_dim": INNER,
        "n_candidates": 5,
        "n_predict": 2,
        "top_k_tokens_per_head": [5, 3],
        "vocab_size": VOCAB,
    }
    tensors = {
        "speculator.emb.0.weight": torch.ones(VOCAB, INNER),
        "speculator.head.0.weight": torch.ones(VOCAB, INNER),
        "speculator.proj.0.weight": torch.ones(INNER, SIZE),
        "speculator.ln.0.weight": torch.ones(INNER),
    }
    return config | changes, tensors


def dflash(
    inner: Mapping[str, Any] | None = None, extra: tuple[str, ...] = (), **changes: Any
) -> Checkpoint:
    """Built on DFlash's layers. extra: names of tensors beside."""
    config = drafter_config(**changes)
    config["dflash_config"] = config["dflash_config"] | dict(inner or {})
    return config, drafter_tensors(config) | {name: torch.ones(SIZE) for name in extra}


def p_eagle(**changes: Any) -> Checkpoint:
    tensors = layer("layers.0", 2) | {
        "embed_tokens.weight": torch.ones(VOCAB, SIZE),
        "fc.weight": torch.ones(SIZE, 3 * SIZE),
        "mask_hidden": torch.ones(1, 3 * SIZE),
        "layers.0.input_layernorm.weight": torch.ones(SIZE),
        "layers.0.hidden_norm.weight": torch.ones(SIZE),
        "norm.weight": torch.ones(SIZE),
        "lm_head.weight": torch.ones(VOCAB, SIZE),
    }
    for number in range(1, 4):
        tensors |= layer(f"layers.{number}")
        tensors[f"layers.{number}.input_layernorm.weight"] = torch.ones(SIZE)
    return LM | {"num_hidden_layers": 4, "draft_vocab_size": VOCAB} | changes, tensors


def pard2(tensor: bool, **changes: Any) -> Checkpoint:
    """tensor: whether its projection lies with the other weights, or in a file of its own."""
    config, tensors = language_model(pard_token=7, spd_type="pard2", **changes)
    config |= {"pard2": True, "pard2_scale": 0.02, "pard2_proj_bias": False}
    config |= {"pard2_target_dim": 2 * SIZE, "pard2_target_layers": [-1, -2]}
    return config, tensors | ({"target_proj.weight": torch.ones(SIZE, SIZE)} if tensor else {})


DSPARK = {
    "projector_type": "dspark",
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 4,
}
DOMINO = {"projector_type": "domino", "pure_draft_prefix_len": 1, "gru_hidden_dim": 16}
DFLASH2 = {"selector_rank": 4, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 8}
HEADS = ("markov_head.w1.weight", "confidence_head.weight")

OTHERS: dict[str, tuple[str, Callable[[], Checkpoint]]] = {
    "EAGLE": ("EAGLE-1", partial(eagle1, architectures=["EAGLEModel"], model_type="eagle")),
    "EAGLE, vLLM's": ("EAGLE-1", partial(eagle1, architectures=["EagleLlamaForCausalLM"])),
    "EAGLE, ModelOpt's": ("EAGLE-1", partial(eagle1, architectures=["LlamaForCausalLMEagle"])),
    "EAGLE, as a Llama": ("EAGLE-1", eagle1),
    "EAGLE, speculators": (
        "EAGLE-1",
        partial(eagle1, architectures=["EagleSpeculator"], speculators_model_type="eagle"),
    ),
    "Medusa": ("Medusa", partial(medusa, architectures=["MedusaModel"], model_type="medusa")),
    "Medusa, not named": ("Medusa", medusa),
    "Medusa, ModelOpt's": (
        "Medusa",
        partial(medusa, "medusa_heads.", architectures=["MedusaLlamaForCausalLM"]),
    ),
    "MLP speculator": (
        "MLP speculator",
        partial(
            mlp_speculator,
            architectures=["MLPSpeculatorPreTrainedModel"],
            model_type="mlp_speculator",
        ),
    ),
    "MLP speculator, Arctic's": (
        "MLP speculator",
        partial(mlp_speculator, architectures=["ArcticMLPSpeculatorPreTrainedModel"]),
    ),
    "DFlash 2": ("DFlash 2", partial(dflash, DFLASH2, architectures=["DFlash2DraftModel"])),
    "DFlash 2, as a DFlash": (
        "DFlash 2",
        partial(
            dflash, DFLASH2, ("selector.hidden_projection.weight", "layers.0.attention_conv.base")
        ),
    ),
    "DSpark": (
        "DSpark",
        partial(dflash, DSPARK, HEADS, architectures=["DSparkDraftModel"]),
    ),
    "DSpark, vLLM's": ("DSpark", partial(dflash, {}, HEADS, architectures=["Qwen3DSparkModel"])),
    "DSpark, as a DFlash": ("DSpark", partial(dflash, DSPARK, HEADS)),
    "DSpark, NVIDIA's": (
        "DSpark",
        partial(dflash, dspark_markov_rank=4, dspark_fixup_head_type="markov"),
    ),
    "DSpark, speculators": (
        "DSpark",
        partial(
            dflash, {}, HEADS, architectures=["DSparkSpeculator"], speculators_model_type="dspark"
        ),
    ),
    "Domino": ("Domino", partial(dflash, DOMINO, architectures=["DominoDraftModel"])),
    "Domino, as a DFlash": ("Domino", partial(dflash, DOMINO)),
    "DFlare": ("DFlare", partial(dflash, architectures=["QwenDFlareDraftModel"])),
    "PARD-2": ("PARD-2", partial(pard2, True)),
    "PARD-2, projection beside": ("PARD-2", partial(pard2, False)),
    "P-EAGLE": ("P-EAGLE", partial(p_eagle, architectures=["PEagleDraftModel"])),
    "P-EAGLE, vLLM's": (
        "P-EAGLE",
        partial(p_eagle, architectures=["PeagleLlamaForCausalLM"], pard_token=7),
    ),
    "P-EAGLE, speculators": (
        "P-EAGLE",
        partial(p_eagle, architectures=["PEagleSpeculator"], speculators_model_type="peagle"),
    ),
    "P-EAGLE, as a Llama": ("P-EAGLE", partial(p_eagle, pard_token=7)),
    "MTP": ("MTP", partial(language_model, architectures=["DeepSeekMTPModel"])),
    "Hydra": (
        "Hydra",
        partial(medusa, "hydra_head.", architectures=["HydraModel"], hydra_num_heads=2),
    ),
    "tree": ("tree", partial(dflash, architectures=["DDTreeDraftModel"])),
}
"""What is published: the name it goes by, and what makes a checkpoint."""
