"""What target and drafters share inside a layer: rotary positions and grouped attention on cached
Keys."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SharpDraftError
from ..method.scale import Policy, as_gain, scale_queries
from ..method.visible import block_keys, causal_keys
from . import kernels
from .cache import KVCache


class Rotary:
    """Cosines and sines of every position, made once; apply by slicing.

    Built by transformers' own rotary module of the model's family, so scaled variants (llama3,
    yarn, linear) come with it. Dynamic variants, whose frequencies change with length, are not
    supported.
    """

    def __init__(
        self, module: torch.nn.Module, positions: int, device: torch.device | str = "cpu"
    ) -> None:
        at = torch.arange(positions)[None]
        cos, sin = module(torch.zeros(1, dtype=torch.float32), at)
        half = cos.shape[-1] // 2
        # The first half of the sine turns the second half of the vector the other way round: its
        # sign is stored so that applying is one multiply and one addcmul.
        sign = torch.cat([-torch.ones(half), torch.ones(half)])
        self.cos = cos[0].float().to(device)
        self.sin = (sin[0].float() * sign).to(device)


@dataclass(frozen=True)
class View:
    """What a new row sees of the Keys before it and of the rows it comes with."""

    causal: bool
    window: int | None = None

    def count(self, context: int | Tensor, rows: int) -> Tensor:
        """Visible Keys of each row, int64 [rows]; context: Keys before the first, a number or int64
        [1]. A window reaches as far ahead as behind, as z-lab's does."""
        keys = (causal_keys if self.causal else block_keys)(context, rows, self.window)[0]
        if not self.causal and self.window is not None and rows > self.window:
            ahead = torch.arange(rows - 1, -1, -1, device=keys.device)
            keys = keys - (ahead - (self.window - 1)).clamp(min=0)
        return keys

    def mask(self, context: int, rows: int, device: torch.device) -> Tensor | None:
        """Visible Keys, bool [rows, context + rows]; None where every row sees them all."""
        if (self.window is None or context + rows <= self.window) and (
            rows == 1 or not self.causal
        ):
            return None
        return self.sees(torch.arange(context, context + rows, device=device), context + rows)

    def sees(self, at: Tensor, keys: int) -> Tensor:
        """Which of the Keys at 0 to `keys` - 1 rows at positions `at` [rows] see: bool [rows,
        keys]. Rows that are not causal see all of each other and nothing behind."""
        key, own = torch.arange(keys, device=at.device)[None], at[:, None]
        visible = key <= (own if self.causal else own[-1:].expand_as(own))
        if self.window is not None:
            visible = visible & (own - key < self.window) & (key - own < self.window)
        return visible


CAUSAL = View(causal=True)

# Shown the Query, Keys and mask of a single request.
Probe = Callable[[Tensor, Tensor, Tensor | None], None]


class Rows(ABC):
    """New rows of a pass, where they stand, and what they see."""

    cos: Tensor
    sin: Tensor
    kind: View

    @property
    def place(self) -> kernels.Place | None:
        """Where they stand, for compiled kernels; None where there are none for them."""
        return None

    @abstractmethod
    def gains(self, policies: Sequence[Policy | None]) -> Tensor | None:
        """The gain of every row, float32 [rows], from the Keys that each sees under its request's
        policy; None where nothing is scaled."""

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate x [1, heads, rows, head_dim] to the rows' positions."""
        return rotate(x, self.cos, self.sin)

    def attention(
        self,
        layer: int,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        *,
        norms: tuple[Tensor, Tensor, float] | None = None,
        gain: Tensor | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """Everything between the projections: norm Queries and Keys, scale the Queries, rotate
        both, write Keys and Values into the caches, and attend.

        qkv [batch, rows, (heads + 2 * kv_heads) * head_dim], which may be overwritten; norms:
        weights of the Query and Key norms [head_dim] and their epsilon; gain [rows], as `gains`
        makes it. Returns [batch, rows, heads * head_dim].
        """
        if (
            probe is None
            and self.place is not None
            and (norms is None or kernels.takes(*norms[:2]))
        ):
            sight = (self.kind.causal, self.kind.window)
            return kernels.attend(
                self.place, layer, qkv.float(), heads, kv_heads, norms, gain, *sight
            )
        batch, rows = qkv.shape[:2]
        each = qkv.view(batch, rows, heads + 2 * kv_heads, -1).transpose(1, 2)
        query, keys, values = each.split((heads, kv_heads, kv_heads), dim=1)
        if norms is not None:
            size, eps = (query.shape[-1],), norms[2]
            query, keys = (
                F.rms_norm(query, size, norms[0], eps),
                F.rms_norm(keys, size, norms[1], eps),
            )
        if gain is not None:
            query = scale_queries(query, gain[None, None])
        return self._attend(layer, self.rotate(query), self.rotate(keys), values, probe)

    @abstractmethod
    def _attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, probe: Probe | None
    ) -> Tensor:
        """Write rotated Keys and Values [batch, kv_heads, rows, head_dim] into the caches, and
        attend."""


class Segments(Rows):
    """New rows of one or several requests as one flat pass, [1, rows] in all, and attention that
    keeps them apart: each request's rows stand behind its own cache. (One request may also be a
    batch of rows at the same positions.)"""

    def __init__(
        self,
        caches: Sequence[KVCache],
        starts: Sequence[int],
        counts: Sequence[int],
        rotary: Rotary,
        kind: View = CAUSAL,
    ) -> None:
        """starts: position of each request's first row. Raises SharpDraftError for no rows, and
        where a cache has no room for them."""
        if min(counts) < 1:
            raise SharpDraftError("a pass needs a row of every request")
        self.caches, self.starts, self.counts, self.kind = (
            list(caches),
            list(starts),
            list(counts),
            kind,
        )
        for cache, start, count in zip(caches, starts, counts, strict=True):
            if start + count > (room := min(cache.capacity, len(rotary.cos))):
                raise SharpDraftError(
                    f"context full: {start} + {count} tokens do not fit into {room}"
                )
        if len(self.counts) == 1:
            at: slice | Tensor = slice(starts[0], starts[0] + counts[0])
        else:
            spans = zip(starts, counts, strict=True)
            at = torch.cat([torch.arange(start, start + count) for start, count in spans]).to(
                rotary.cos.device
            )
        self.cos, self.sin = rotary.cos[at], rotary.sin[at]
        self._requests = kernels.requests(caches, starts, counts)

    def gains(self, policies: Sequence[Policy | None]) -> Tensor | None:
        if all(policy is None for policy in policies):
            return None
        counted = zip(policies, self.starts, self.counts, strict=True)
        gains = [
            _gain(policy, self.kind, start, count, self.cos.device)
            for policy, start, count in counted
        ]
        return gains[0] if len(gains) == 1 else torch.cat(gains)

    @cached_property
    def _masks(self) -> list[Tensor | None]:
        """Additive masks, for attention in PyTorch operations."""
        cache = self.caches[0].keys
        spans = zip(self.starts, self.counts, strict=True)
        masks = [self.kind.mask(start, count, cache.device) for start, count in spans]
        return [None if mask is None else additive(mask, cache.dtype) for mask in masks]

    @cached_property
    def place(self) -> kernels.Place | None:
        if self._requests is None:
            return None
        turns, (layers, batch, heads, _, dim) = (self.cos, self.sin), self.caches[0].keys.shape
        if batch > 1:
            turns = (self.cos.repeat(batch, 1), self.sin.repeat(batch, 1))
        return kernels.Place(self._requests, turns, (layers, heads, dim))

    def _attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, probe: Probe | None
    ) -> Tensor:
        parts = []
        rows = zip(
            self.caches,
            self.starts,
            self._masks,
            query.split(self.counts, 2),
            keys.split(self.counts, 2),
            values.split(self.counts, 2),
            strict=True,
        )
        for cache, start, mask, own_query, own_keys, own_values in rows:
            all_keys, all_values = cache.write(layer, start, own_keys, own_values)
            if probe is not None:
                probe(own_query, all_keys, mask)
            free = 0 if self.kind.window is not None else start
            parts.append(attend(own_query.to(all_keys.dtype), all_keys, all_values, mask, free))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class FixedRows(Rows):
    """A fixed number of rows of one request at a position that only the device knows, over a fixed
    number of Keys of which a mask hides those behind: the same operations on the same memory at
    every length, as a CUDA graph needs them.
    """

    def __init__(
        self,
        cache: KVCache,
        start: Tensor,
        rows: int,
        keys: int,
        rotary: Rotary,
        kind: View = CAUSAL,
    ) -> None:
        """start: position of the first row, int64 [1]; keys: how many to attend over, at least up
        to the last row."""
        self.cache, self.start, self.rows, self.kind = cache, start, rows, kind
        self.keys = min(keys, cache.capacity)
        self.at = start + torch.arange(rows, device=start.device)
        self.cos, self.sin = rotary.cos[self.at], rotary.sin[self.at]

    def gains(self, policies: Sequence[Policy | None]) -> Tensor | None:
        (policy,) = policies or (None,)
        return None if policy is None else policy.gain(self.kind.count(self.start, self.rows))

    @cached_property
    def _hidden(self) -> Tensor:
        return ~self.kind.sees(self.at, self.keys)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys/values [1, kv_heads, rows, head_dim] where the rows stand; returns views of all
        that are attended over, [kv_heads, keys, head_dim]."""
        layer_keys, layer_values = self.cache.keys[layer], self.cache.values[layer]
        layer_keys.index_copy_(2, self.at, keys.to(layer_keys.dtype))
        layer_values.index_copy_(2, self.at, values.to(layer_values.dtype))
        return layer_keys[0, :, : self.keys], layer_values[0, :, : self.keys]

    def _attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, probe: Probe | None
    ) -> Tensor:
        all_keys, all_values = self.write(layer, keys, values)
        heads, rows, dim = query.shape[1:]
        kv_heads = len(all_keys)
        group = heads // kv_heads
        query = query[0].reshape(kv_heads, group * rows, dim).to(all_keys.dtype)
        scores = _float_product(query, all_keys.transpose(1, 2)) / math.sqrt(dim)
        shares = (
            scores.masked_fill(self._hidden.repeat(group, 1), -torch.inf)
            .softmax(-1)
            .to(all_values.dtype)
        )
        # Few heads would leave most of a GPU idle: the Keys are mixed in chunks, which are then
        # added up.
        chunk = _CHUNK if self.keys % _CHUNK == 0 else self.keys
        mixed = shares.unflatten(-1, (-1, chunk)).transpose(1, 2) @ all_values.unflatten(
            1, (-1, chunk)
        )
        return (
            mixed.float()
            .sum(1)
            .view(heads, rows, dim)
            .transpose(0, 1)
            .reshape(1, rows, -1)
            .to(query.dtype)
        )


def _float_product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product in float32 of operands in any dtype, without copies of them where the device
    can."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def chain_gains(
    policies: Sequence[Policy | None], starts: Sequence[int], count: int, device: torch.device
) -> Tensor | None:
    """What `Segments.gains` says along chains of `count` causal rows, one at a time, from each
    request's start on: float32 [requests, count], or None."""
    if all(policy is None for policy in policies):
        return None
    chains = [
        _gain(policy, CAUSAL, start, count, device)
        for policy, start in zip(policies, starts, strict=True)
    ]
    return chains[0][None] if len(chains) == 1 else torch.stack(chains)


def _gain(
    policy: Policy | None, kind: View, start: int, count: int, device: torch.device
) -> Tensor:
    """The gain of `count` rows of one request from `start` on."""
    if policy is None:
        return torch.zeros(count, device=device)
    if kind.window is not None:
        return as_gain(policy.gain(kind.count(start, count))).to(device)
    # A drafter's pass is short: a gain is looked up in less time than it takes to count and compute
    # it.
    end = start + count
    table = _gain_table(policy, device, 1 << end.bit_length())
    return table[start + 1 : end + 1] if kind.causal else table[end : end + 1].expand(count)


@lru_cache(maxsize=64)
def _gain_table(policy: Policy, device: torch.device, size: int) -> Tensor:
    """The gain at 0 to `size` - 1 visible Keys."""
    return as_gain(policy.gain(torch.arange(size))).to(device)


# Keys that one thread block of a GPU mixes.
_CHUNK = 256


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate x [..., rows, head_dim] by rows of a Rotary's tables, in the dtype of x."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos.to(x.dtype), swapped, signed_sin.to(x.dtype))


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
