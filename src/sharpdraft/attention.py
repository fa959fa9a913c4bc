"""What target and drafters share inside a layer: rotary positions and grouped attention on cached Keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode.cache import KVCache
from .errors import SharpDraftError


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


class Segments:
    """New rows of one or several requests as one flat pass, [1, rows] in all, and attention that keeps them apart: each
    request's rows stand behind its own cache. (One request may also be a batch of rows at the same positions.)"""

    def __init__(self, caches: Sequence[KVCache], starts: Sequence[int], counts: Sequence[int], rotary: Rotary) -> None:
        """starts: position of each request's first row. Raises SharpDraftError where a cache has no room for them."""
        self.caches, self.starts, self.counts = list(caches), list(starts), list(counts)
        for cache, start, count in zip(caches, starts, counts, strict=True):
            if start + count > cache.capacity:
                raise SharpDraftError(f"context full: {start} + {count} tokens do not fit into {cache.capacity}")
        if len(self.counts) == 1:
            at: slice | Tensor = slice(starts[0], starts[0] + counts[0])
        else:
            spans = zip(starts, counts, strict=True)
            at = torch.cat([torch.arange(start, start + count) for start, count in spans]).to(rotary.cos.device)
        self.cos, self.sin = rotary.cos[at], rotary.sin[at]

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate x [1, heads, rows, head_dim] to the rows' positions."""
        return rotate(x, self.cos, self.sin)

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        masks: Sequence[Tensor | None],
        probe: Callable[[Tensor, Tensor, Tensor | None], None] | None = None,
        *,
        windowed: bool = False,
    ) -> Tensor:
        """Write the rows' Keys and Values into their caches and attend. query [1, heads, rows, head_dim]; masks: each
        request's, as in `attend`; probe: shown each request's Query, Keys and mask; windowed: whether masks hide Keys
        that were cached before. Returns [1, rows, heads * dim]."""
        parts = []
        rows = zip(
            self.caches,
            self.starts,
            masks,
            query.split(self.counts, 2),
            keys.split(self.counts, 2),
            values.split(self.counts, 2),
            strict=True,
        )
        for cache, start, mask, own_query, own_keys, own_values in rows:
            all_keys, all_values = cache.write(layer, start, own_keys, own_values)
            if probe is not None:
                probe(own_query, all_keys, mask)
            free = 0 if windowed else start
            parts.append(attend(own_query.to(all_keys.dtype), all_keys, all_values, mask, free))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate x [..., rows, head_dim] by rows of a Rotary's tables, in the dtype of x."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos.to(x.dtype), swapped, signed_sin.to(x.dtype))


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, free: int = 0) -> Tensor:
    """Grouped attention without repeated Keys: the Queries of one group are rows of one product.

    query [batch, heads, rows, head_dim]; keys, values [batch, kv_heads, length, head_dim]; mask
    [..., rows, length], bool (True is visible) or additive, or None (all visible); free: how many of the first Keys the
    mask hides from no row.
    Returns [batch, rows, heads * head_dim].
    """
    batch, heads, rows, dim = query.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    if rows == 1 and batch > 1:
        # Many sequences, one row each: memory-bound, and the kernel's own grouping reads Keys once.
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=group > 1).reshape(batch, 1, heads * dim)
    if group > 1:
        query = query.reshape(batch, kv_heads, group * rows, dim)
        mask = None if mask is None else torch.cat([mask] * group, dim=-2)
    chunks = _chunks(query, kv_heads, length if mask is None else free)
    if chunks > 1:
        out = _attend_in_chunks(query, keys, values, mask, (length if mask is None else free) // chunks, chunks)
    else:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    return out.reshape(batch, heads, rows, dim).transpose(1, 2).reshape(batch, rows, heads * dim)


# Fewer Keys than these are not worth putting chunks together again.
_CHUNKED_FROM = 2048
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _chunks(query: Tensor, kv_heads: int, free: int) -> int:
    """Into how many parts to cut the Keys, so that every thread has the same work: the CPU kernel gives a thread whole
    heads, and few heads leave some threads idle."""
    if query.device.type != "cpu" or len(query) > 1 or free < _CHUNKED_FROM or torch.is_grad_enabled():
        return 1
    threads = torch.get_num_threads()
    return threads // math.gcd(kv_heads, threads)


def _attend_in_chunks(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, size: int, chunks: int
) -> Tensor:
    """Attention over `chunks` parts of `size` Keys, which no mask hides, as a batch, and over the rest; each part's
    result weighs as much as its softmax would have had in the whole."""
    end = chunks * size
    parts = [each[:, :, :end].unflatten(2, (chunks, size))[0].transpose(0, 1) for each in (keys, values)]
    out, log_sum = _flash(query.expand(chunks, -1, -1, -1), *parts)
    if end < keys.shape[2]:
        rest = None if mask is None else mask[..., end:]
        if rest is not None and rest.dtype == torch.bool:
            rest = additive(rest, query.dtype)
        last, last_sum = _flash(query, keys[:, :, end:], values[:, :, end:], attn_mask=rest)
        out, log_sum = torch.cat((out, last)), torch.cat((log_sum, last_sum))
    return (out * log_sum.softmax(0)[..., None].to(out.dtype)).sum(0, keepdim=True)


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
