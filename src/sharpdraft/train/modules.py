"""Trainable layers under their published names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model.causal_lm import CausalLM


class Norm(nn.RMSNorm):
    """RMS norm with its weight in the input's dtype, which is what the fused kernel takes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections of grouped attention; `inputs` is the width that Query, Key and Value are made
    from."""

    def __init__(self, inputs: int, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.q_proj = nn.Linear(inputs, heads * dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[batch, rows, heads * dim] -> [batch, heads, rows, dim]"""
        return x.view(*x.shape[:2], -1, self.dim).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


@torch.no_grad()
def start_from(attn: Attention, mlp: MLP, target: CausalLM, source: int) -> None:
    """Take over the weights of the target's layer `source`. Where Queries, Keys and Values are made
    from more than a hidden state, the state comes last and what is before it starts at zero."""
    layer = target.stack.layers[source]
    width = target.hidden_size
    sizes = [m.weight.shape[0] for m in (attn.q_proj, attn.k_proj, attn.v_proj)]
    for module, weight in zip(
        (attn.q_proj, attn.k_proj, attn.v_proj), layer.qkv.weight.split(sizes), strict=True
    ):
        module.weight.zero_()
        module.weight[:, -width:] = weight.float()
    attn.o_proj.weight.copy_(layer.out.weight)
    gate, up = layer.gate_up.weight.chunk(2)
    mlp.gate_proj.weight.copy_(gate)
    mlp.up_proj.weight.copy_(up)
    mlp.down_proj.weight.copy_(layer.down.weight)
