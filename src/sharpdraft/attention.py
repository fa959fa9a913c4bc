"""What target and drafters share inside a layer: rotary positions and grouped attention on cached Keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Rotary:
    """Cosines and sines of every position, made once; apply by slicing.

    Built by transformers' own rotary module of the model's family, so scaled variants (llama3, yarn,
    linear) come with it. Dynamic variants, whose frequencies change with length, are not supported.
    """

    def __init__(self, module: torch.nn.Module, positions: int, device: torch.device | str = "cpu") -> None:
        at = torch.arange(positions)[None]
        cos, sin = module(torch.zeros(1, dtype=torch.float32), at)
        half = cos.shape[-1] // 2
        # The first half of the sine turns the second half of the vector the other way round: its sign is
        # stored so that applying is one multiply and one addcmul.
        sign = torch.cat([-torch.ones(half), torch.ones(half)])
        self.cos = cos[0].float().to(device)
        self.sin = (sin[0].float() * sign).to(device)

    def __call__(self, x: Tensor, start: int) -> Tensor:
        """Rotate x [batch, heads, rows, head_dim], whose row i stands at position start + i."""
        end = start + x.shape[2]
        return rotate(x, self.cos[start:end], self.sin[start:end])


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate x [..., rows, head_dim] by rows of a Rotary's tables, in the dtype of x."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos.to(x.dtype), swapped, signed_sin.to(x.dtype))


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped attention without repeated Keys: the Queries of one group are rows of one product.

    query [batch, heads, rows, head_dim]; keys, values [batch, kv_heads, length, head_dim]; mask
    [..., rows, length], bool (True is visible) or additive, or None (all visible).
    Returns [batch, rows, heads * head_dim].
    """
    batch, heads, rows, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    if rows == 1 and batch > 1:
        # Many sequences, one row each: memory-bound, and the kernel's own grouping reads Keys once.
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=group > 1).reshape(batch, 1, heads * dim)
    if group > 1:
        query = query.reshape(batch, kv_heads, group * rows, dim)
        mask = None if mask is None else torch.cat([mask] * group, dim=-2)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    return out.reshape(batch, heads, rows, dim).transpose(1, 2).reshape(batch, rows, heads * dim)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as what is added to scores: 0 where visible, -inf elsewhere. Attention would make the same of a
    bool mask, but in every layer anew."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def causal_mask(past: int, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Additive mask [rows, past + rows] of causal rows behind `past` cached Keys; None where all are visible."""
    if rows == 1:
        return None
    visible = torch.ones((rows, past + rows), dtype=torch.bool, device=device).tril_(past)
    return additive(visible, dtype)
