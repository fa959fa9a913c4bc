"""The tensors that published checkpoints hold, by name and shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SharpDraftError
from ..model.config import Config
from ..model.rotary import has_frequencies

if TYPE_CHECKING:
    from .eagle3 import Eagle3

Shapes = dict[str, tuple[int, ...]]

TRAINING = ("verifier_lm_head.weight", "verifier_norm.weight")
"""The target's own, which speculators' trainer leaves in a checkpoint and engines pass over."""


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are called where none stands under `model.` or is a `midlayer`. Raises
    SharpDraftError where two have one name by that, and differ."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        if plain in found and not torch.equal(found[plain], tensor):
            raise SharpDraftError(
                f"the drafter's checkpoint has two tensors for {plain}, one of them {name}, that "
                "differ: remove the wrong one"
            )
        found[plain] = tensor
    return found


def check_frequencies(config: Config, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of the frequencies that old checkpoints hold. Raises SharpDraftError where they are
    not those of the configuration."""
    names = tuple(name for name in tensors if name.endswith("rotary_emb.inv_freq"))
    for name in names:
        if not has_frequencies(config, tensors[name]):
            raise SharpDraftError(
                f"the drafter's {name} has other rotary positions than its config.json says: "
                "correct rope_theta or rope_parameters there"
            )
    return names


def dflash_shapes(config: Config, taps: int, target_size: int, tensors: Collection[str]) -> Shapes:
    """Names and shapes of a whole DFlash checkpoint that reads `taps` states [target_size] and has
    `tensors`; without those of its vocabulary."""
    size = config.hidden_size
    shapes: Shapes = {
        "fc.weight": (size, taps * target_size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        shapes |= _layer(config, at, size)
        shapes |= {f"{at}.self_attn.{norm}.weight": (config.head_dim,) for norm in _HEAD_NORMS}
        shapes[f"{at}.input_layernorm.weight"] = (size,)
    return _with_biases(shapes, config, tensors)


def eagle3_shapes(config: Config, drafter: Eagle3, tensors: Collection[str]) -> Shapes:
    """Names and shapes of a whole EAGLE-3 checkpoint that has `tensors`; without those of its
    vocabulary."""
    size, count, target_size = config.hidden_size, len(drafter.taps), drafter.target.hidden_size
    shapes: Shapes = {
        "fc.weight": (size, count * target_size),
        "norm.weight": (size,),
        **_layer(config, "layers.0", 2 * size),
        "layers.0.input_layernorm.weight": (size,),
        "layers.0.hidden_norm.weight": (size,),
    }
    norms = [f"layers.0.self_attn.{norm}.weight" for norm in _HEAD_NORMS]
    if any(norm in tensors for norm in norms):
        shapes |= dict.fromkeys(norms, (config.head_dim,))
    if drafter.norm_before_fc:
        shapes["input_norm.weight"] = (count * target_size,)
    if drafter.has_tap_norms:
        shapes |= {f"fc_norm.{i}.weight": (target_size,) for i in range(count)}
    return _with_biases(shapes, config, tensors)


_HEAD_NORMS = ("q_norm", "k_norm")


def _layer(config: Config, at: str, ins: int) -> Shapes:
    """Of a layer whose Queries, Keys and Values are made of `ins` numbers."""
    size, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        f"{at}.self_attn.q_proj.weight": (q, ins),
        f"{at}.self_attn.k_proj.weight": (kv, ins),
        f"{at}.self_attn.v_proj.weight": (kv, ins),
        f"{at}.self_attn.o_proj.weight": (size, q),
        f"{at}.mlp.gate_proj.weight": (inner, size),
        f"{at}.mlp.up_proj.weight": (inner, size),
        f"{at}.mlp.down_proj.weight": (size, inner),
        f"{at}.post_attention_layernorm.weight": (size,),
    }


def _with_biases(shapes: Shapes, config: Config, tensors: Collection[str]) -> Shapes:
    """And the biases: those of Queries, Keys and Values that the configuration asks for, and any
    other that the checkpoint has. (Some have one behind attention too, some have not.)"""
    source = config.source
    asked = config.attention_bias or bool(source.get("qkv_bias")) or bool(source.get("bias"))
    found = dict(shapes)
    for name, shape in shapes.items():
        if len(shape) == 2:
            bias = f"{name.removesuffix('weight')}bias"
            wanted = asked and any(f"{p}_proj" in name for p in ("q", "k", "v"))
            wanted = wanted or (bool(source.get("mlp_bias")) and ".mlp." in name)
            if wanted or bias in tensors:
                found[bias] = shape[:1]
    return found
