"""The tensors that published checkpoints hold, by name and shape."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dflash import DFlash
    from .eagle3 import Eagle3


def dflash_shapes(drafter: DFlash, inner: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a whole DFlash checkpoint."""
    size, dim = drafter.hidden_size, drafter.head_dim
    q, kv = drafter.heads * dim, drafter.kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(drafter.taps) * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for i in range(drafter.num_layers):
        attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        out_in = {
            "q_proj": (q, size),
            "k_proj": (kv, size),
            "v_proj": (kv, size),
            "o_proj": (size, q),
        }
        for name, shape in out_in.items():
            shapes[f"{attn}.{name}.weight"] = shape
            if bias:
                shapes[f"{attn}.{name}.bias"] = shape[:1]
        shapes |= {f"{attn}.q_norm.weight": (dim,), f"{attn}.k_norm.weight": (dim,)}
        shapes |= {f"{mlp}.gate_proj.weight": (inner, size), f"{mlp}.up_proj.weight": (inner, size)}
        shapes |= {f"{mlp}.down_proj.weight": (size, inner)}
        shapes |= {
            f"layers.{i}.{n}.weight": (size,)
            for n in ("input_layernorm", "post_attention_layernorm")
        }
    return shapes


def eagle3_shapes(
    drafter: Eagle3, inner: int, bias: bool, tensors: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a whole EAGLE-3 checkpoint that has `tensors`."""
    size = drafter.hidden_size
    q, kv = drafter.heads * drafter.head_dim, drafter.kv_heads * drafter.head_dim
    layer = "layers.0"
    projections = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(drafter.taps) * size),
        "norm.weight": (size,),
        f"{layer}.self_attn.o_proj.weight": (size, q),
        f"{layer}.mlp.gate_proj.weight": (inner, size),
        f"{layer}.mlp.up_proj.weight": (inner, size),
        f"{layer}.mlp.down_proj.weight": (size, inner),
    }
    shapes |= {
        f"{layer}.self_attn.{name}.weight": (rows, 2 * size) for name, rows in projections.items()
    }
    if bias:
        shapes |= {f"{layer}.self_attn.{name}.bias": (rows,) for name, rows in projections.items()}
    shapes |= {
        f"{layer}.{n}.weight": (size,)
        for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    if drafter.norm_before_fc:
        shapes["input_norm.weight"] = (len(drafter.taps) * size,)
    if drafter.has_tap_norms:
        shapes |= {f"fc_norm.{i}.weight": (size,) for i in range(len(drafter.taps))}
    if "embed_tokens.weight" in tensors:
        shapes["embed_tokens.weight"] = (drafter.vocab_size, size)
    reduced = drafter.draft_vocab_size != drafter.vocab_size
    if reduced or "lm_head.weight" in tensors:
        shapes["lm_head.weight"] = (drafter.draft_vocab_size, size)
    if reduced:
        shapes["d2t"] = (drafter.draft_vocab_size,)
    return shapes
