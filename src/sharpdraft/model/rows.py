"""New rows of a pass: the positions they are rotated to, the slots their Keys are kept in, and what
they see of the Keys there.

A row's position is its place in the text; its slot is where a cache keeps its Key. Both are the
same until a cache is compacted. Visibility and counts go by slots (see `method.visible`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SharpDraftError
from ..method.scale import Policy, Scale, as_gain, policy_at, scale_queries
from ..method.visible import View
from . import kernels
from .attention import additive, attend
from .cache import KVCache
from .rotary import Rotary, rotate

Norms = tuple[Tensor, Tensor, float]
"""Weights of a layer's Query and Key norms [head_dim], and their epsilon."""

Probe = Callable[[Tensor, Tensor, Tensor | None], None]
"""Shown the Query and Keys of a single request, and what is visible: bool [rows, keys], or None
where all is."""


class Rows(ABC):
    """New rows of a pass. cos, sin: tables of their positions, float32 [rows, head_dim]."""

    cos: Tensor
    sin: Tensor

    @property
    def place(self) -> kernels.Place | None:
        """Where they stand, for compiled kernels; None where there are none for them."""
        return None

    def gains(self, scales: Sequence[Scale | None], views: Sequence[View]) -> list[Tensor | None]:
        """The gain of every row in every layer, float32 [rows], from the Keys that it sees there;
        None where nothing is scaled. Layers whose policies and view are equal share one tensor.

        scales: one for each request, or none at all. views: one for each layer.
        """
        if all(scale is None for scale in scales):
            return [None] * len(views)
        made: dict[tuple[View, tuple[Policy | None, ...]], Tensor | None] = {}
        found = []
        own = zip(*(_policies(scale, len(views)) for scale in scales), strict=True)
        for key in zip(views, own, strict=True):
            if key not in made:
                view, policies = key
                scaled = any(policy is not None for policy in policies)
                made[key] = self._gain(policies, view) if scaled else None
            found.append(made[key])
        return found

    @abstractmethod
    def _gain(self, policies: Sequence[Policy | None], view: View) -> Tensor:
        """The gain of every row of a layer, float32 [rows]; policies: one for each request."""

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate x [..., rows, head_dim] to the rows' positions."""
        return rotate(x, self.cos, self.sin)

    @abstractmethod
    def write(self, layer: int | slice, keys: Tensor, values: Tensor) -> None:
        """Keep rotated Keys and Values in the rows' slots.

        keys, values: [batch, kv_heads, rows, head_dim] for one layer; for a slice of layers, of a
        batch of one, [layers, kv_heads, rows, head_dim].
        """

    def attention(
        self,
        layer: int,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        view: View,
        *,
        norms: Norms | None = None,
        gain: Tensor | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """Everything between the projections: norm Queries and Keys, scale the Queries, rotate
        both, write Keys and Values into the caches, and attend.

        qkv [batch, rows, (heads + 2 * kv_heads) * head_dim], which may be overwritten; gain [rows],
        as `gains` makes it. Returns [batch, rows, heads * head_dim].
        """
        place = self.place if probe is None else None
        if place is not None and (norms is None or kernels.takes(*norms[:2])):
            return kernels.attend(place, layer, qkv.float(), heads, kv_heads, view, norms, gain)
        batch, rows = qkv.shape[:2]
        each = qkv.view(batch, rows, heads + 2 * kv_heads, -1).transpose(1, 2)
        query, keys, values = each.split((heads, kv_heads, kv_heads), dim=1)
        if norms is not None:
            size, eps = (query.shape[-1],), norms[2]
            query = F.rms_norm(query, size, norms[0], eps)
            keys = F.rms_norm(keys, size, norms[1], eps)
        if gain is not None:
            query = scale_queries(query, gain[None, None])
        self.write(layer, self.rotate(keys), values)
        return self._attend(layer, self.rotate(query), view, probe)

    @abstractmethod
    def _attend(self, layer: int, query: Tensor, view: View, probe: Probe | None) -> Tensor:
        """Attend with rotated Queries [batch, heads, rows, head_dim] to the Keys in the caches, of
        which the rows' own are the last: [batch, rows, heads * head_dim]."""


class RaggedRows(Rows):
    """Rows of one or several requests as one flat pass, [1, rows] in all, and attention that keeps
    them apart. (One request may also be a batch of rows in the same slots.)"""

    def __init__(
        self,
        caches: Sequence[KVCache],
        starts: Sequence[int],
        counts: Sequence[int],
        rotary: Rotary,
        positions: Sequence[int] | None = None,
    ) -> None:
        """starts: slot of each request's first row. counts: rows of each. positions: position of
        each request's first row, by default its slot.

        Raises SharpDraftError for a request without rows, and where a cache has no room for them or
        the model no position.
        """
        if min(counts) < 1:
            raise SharpDraftError("a pass needs a row of every request")
        self.caches, self.starts, self.counts = list(caches), list(starts), list(counts)
        self.positions = self.starts if positions is None else list(positions)
        known = rotary.positions
        for cache, start, at, count in zip(
            caches, self.starts, self.positions, self.counts, strict=True
        ):
            for first, room in ((start, cache.capacity), (at, known)):
                if first + count > room:
                    raise SharpDraftError(
                        f"context full: {first} + {count} tokens do not fit into {room}"
                    )
        spans = zip(self.positions, self.counts, self.caches, strict=True)
        if len(self.counts) == 1 or rotary.limit is not None:
            turns = [rotary.at(at, count, cache.since) for at, count, cache in spans]
            self.cos, self.sin = (
                turns[0] if len(turns) == 1 else map(torch.cat, zip(*turns, strict=True))
            )
        else:
            span = torch.cat([torch.arange(at, at + count) for at, count, _ in spans])
            span = span.to(rotary.cos.device)
            self.cos, self.sin = rotary.cos[span], rotary.sin[span]
        self._masks: dict[View, list[Tensor | None]] = {}
        self._requests = kernels.requests(self.caches, self.starts, self.counts)

    @cached_property
    def place(self) -> kernels.Place | None:
        if self._requests is None:
            return None
        turns, (layers, batch, heads, _, dim) = (self.cos, self.sin), self.caches[0].keys.shape
        if batch > 1:
            turns = (self.cos.repeat(batch, 1), self.sin.repeat(batch, 1))
        return kernels.Place(self._requests, turns, (layers, heads, dim))

    def write(self, layer: int | slice, keys: Tensor, values: Tensor) -> None:
        split = keys.split(self.counts, -2), values.split(self.counts, -2)
        for cache, *own in zip(self.caches, self.starts, *split, strict=True):
            cache.write(layer, *own)

    def _gain(self, policies: Sequence[Policy | None], view: View) -> Tensor:
        device = self.cos.device
        counted = zip(policies, self.starts, self.counts, strict=True)
        gains = [_gain(policy, view, start, count, device) for policy, start, count in counted]
        return gains[0] if len(gains) == 1 else torch.cat(gains)

    def _masks_of(self, view: View) -> list[Tensor | None]:
        """Additive masks of each request."""
        if view not in self._masks:
            keys = self.caches[0].keys
            spans = zip(self.starts, self.counts, strict=True)
            masks = [view.mask(start, count, keys.device) for start, count in spans]
            self._masks[view] = [None if m is None else additive(m, keys.dtype) for m in masks]
        return self._masks[view]

    def _attend(self, layer: int, query: Tensor, view: View, probe: Probe | None) -> Tensor:
        mixed = []
        parts = (self.caches, self.starts, self._masks_of(view), query.split(self.counts, 2))
        for cache, start, mask, own in zip(*parts, strict=True):
            rows = own.shape[2]
            keys, values = (memory[:, :, : start + rows] for memory in cache.at(layer))
            if probe is not None:
                probe(own, keys, view.mask(start, rows, keys.device))
            sinks, first = view.reach(start)
            if first:
                keys, values = _without(keys, sinks, first, 2), _without(values, sinks, first, 2)
                mask = None if mask is None else _without(mask, sinks, first, 1)
            free = 0 if view.window is not None else start
            mixed.append(attend(own.to(keys.dtype), keys, values, mask, free))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)


def _without(x: Tensor, sinks: int, first: int, dim: int) -> Tensor:
    """x without what lies between the first `sinks` along a dimension and `first`."""
    rest = x.narrow(dim, first, x.shape[dim] - first)
    return torch.cat((x.narrow(dim, 0, sinks), rest), dim) if sinks else rest


@lru_cache(maxsize=64)
def _policies(scale: Scale | None, layers: int) -> tuple[Policy | None, ...]:
    """The policy of every layer."""
    return tuple(policy_at(scale, layer) for layer in range(layers))


def _gain(
    policy: Policy | None, view: View, start: int, count: int, device: torch.device
) -> Tensor:
    """The gain of `count` rows of one request from slot `start` on."""
    if policy is None:
        return torch.zeros(count, device=device)
    if view.window is not None:
        return as_gain(policy.gain(view.count(start, count))).to(device)
    # A drafter's pass is short: a gain is looked up in less time than it takes to count and compute
    # it.
    end = start + count
    table = _gain_table(policy, device, 1 << end.bit_length())
    return table[start + 1 : end + 1] if view.causal else table[end : end + 1].expand(count)


@lru_cache(maxsize=64)
def _gain_table(policy: Policy, device: torch.device, size: int) -> Tensor:
    """The gain at 0 to `size` - 1 visible Keys."""
    return as_gain(policy.gain(torch.arange(size))).to(device)
