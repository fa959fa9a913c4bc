"""Grouped attention in PyTorch operations, for where there are no kernels and where gradients are
wanted."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, free: int = 0
) -> Tensor:
    """Grouped attention without repeated Keys: the Queries of one group are rows of one product.

    query [batch, heads, rows, head_dim]; keys, values [batch, kv_heads, length, head_dim]; mask
    [..., rows, length], bool (True is visible) or additive, or None (all visible); free: how many
    of the first Keys the mask hides from no row. Returns [batch, rows, heads * head_dim].
    """
    batch, heads, rows, dim = query.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    if rows == 1 and batch > 1 and mask is None:
        # Many sequences, one row each: memory-bound, and the kernel's own grouping reads Keys once.
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=group > 1).reshape(
            batch, 1, heads * dim
        )
    if group > 1:
        query = query.reshape(batch, kv_heads, group * rows, dim)
        mask = None if mask is None else torch.cat([mask] * group, dim=-2)
    chunks = _chunks(query, kv_heads, length if mask is None else free)
    if chunks > 1:
        out = _attend_in_chunks(
            query, keys, values, mask, (length if mask is None else free) // chunks, chunks
        )
    else:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    return out.reshape(batch, heads, rows, dim).transpose(1, 2).reshape(batch, rows, heads * dim)


# Fewer Keys than these are not worth putting chunks together again.
_CHUNKED_FROM = 2048
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _chunks(query: Tensor, kv_heads: int, free: int) -> int:
    """Into how many parts to cut the Keys, so that every thread has the same work: the CPU kernel
    gives a thread whole heads, and few heads leave some threads idle."""
    if (
        query.device.type != "cpu"
        or len(query) > 1
        or free < _CHUNKED_FROM
        or torch.is_grad_enabled()
    ):
        return 1
    threads = torch.get_num_threads()
    return threads // math.gcd(kv_heads, threads)


def _attend_in_chunks(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, size: int, chunks: int
) -> Tensor:
    """Attention over `chunks` parts of `size` Keys, which no mask hides, as a batch, and over the
    rest; each part's result weighs as much as its softmax would have had in the whole."""
    end = chunks * size
    parts = [
        each[:, :, :end].unflatten(2, (chunks, size))[0].transpose(0, 1) for each in (keys, values)
    ]
    out, log_sum = _flash(query.expand(chunks, -1, -1, -1), *parts)
    if end < keys.shape[2]:
        rest = None if mask is None else mask[..., end:]
        if rest is not None and rest.dtype == torch.bool:
            rest = additive(rest, query.dtype)
        last, last_sum = _flash(query, keys[:, :, end:], values[:, :, end:], attn_mask=rest)
        out, log_sum = torch.cat((out, last)), torch.cat((log_sum, last_sum))
    return (out * log_sum.softmax(0)[..., None].to(out.dtype)).sum(0, keepdim=True)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as what is added to scores: 0 where visible, -inf elsewhere. Attention would make
    the same of a bool mask, but in every layer anew."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, -torch.inf
    )
