"""The layers of Llama's family, which target and drafters share: one pass of new rows over cached
Keys."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from ..errors import SharpDraftError
from ..method.visible import View
from . import kernels
from .kernels import add_norm
from .linear import Linear, gated_mlp
from .rows import Rows

# Shown the layer's index and the Query, Keys and mask of a single request.
LayerProbe = Callable[[int, Tensor, Tensor, Tensor | None], None]


@dataclass(frozen=True)
class Layer:
    """Norm weights [size]; q_norm, k_norm: of each head [head_dim], both or neither."""

    attn_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass
class Stack:
    """Layers one behind the other, and the norm behind the last [size]."""

    layers: tuple[Layer, ...]
    norm: Tensor
    heads: int
    kv_heads: int
    eps: float

    def run(
        self,
        hidden: Tensor,
        rows: Rows,
        views: Sequence[View],
        gains: Sequence[Tensor | None],
        *,
        normed: Tensor | None = None,
        taps: Collection[int] = (),
        probe: LayerProbe | None = None,
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Run hidden [batch, rows, size], which may be overwritten, through all layers.

        views, gains: what rows see in each layer, and the gain of their Queries there (see
        `Rows.gains`). normed: what the first layer projects [batch, rows, any], if it is not
        `hidden` under that layer's norm. taps: layers whose outputs are wanted.

        Returns the last layer's output, the same normed, and the tapped outputs by layer, all
        [batch, rows, size] in the dtype of hidden. Raises SharpDraftError for a layer that is not
        there, for views or gains of more or fewer layers, and for a cache of another shape.
        """
        if not len(views) == len(gains) == len(self.layers):
            raise SharpDraftError(
                f"{len(views)} views and {len(gains)} gains for {len(self.layers)} layers"
            )
        if not all(0 <= tap < len(self.layers) for tap in taps):
            raise SharpDraftError(
                f"layers {sorted(taps)} are asked for: there are 0 to {len(self.layers) - 1}"
            )
        if probe is None:
            done = self._compiled(hidden, rows, views, gains, normed, taps)
            if done is not None:
                return done
        delta: Tensor | None = None
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index or normed is None:
                hidden, normed = add_norm(hidden, delta, layer.attn_norm, self.eps)
            if index - 1 in taps:
                tapped[index - 1] = hidden.clone()
            norms = (
                None
                if layer.q_norm is None or layer.k_norm is None
                else (layer.q_norm, layer.k_norm, self.eps)
            )
            mixed = rows.attention(
                index,
                layer.qkv(normed),
                self.heads,
                self.kv_heads,
                views[index],
                norms=norms,
                gain=gains[index],
                probe=None if probe is None else partial(probe, index),
            )
            hidden, normed = add_norm(hidden, layer.out(mixed), layer.mlp_norm, self.eps)
            delta = gated_mlp(normed, layer.gate_up, layer.down)
        hidden, final = add_norm(hidden, delta, self.norm, self.eps)
        if (last := len(self.layers) - 1) in taps:
            tapped[last] = hidden
        return hidden, final, tapped

    def __getstate__(self) -> dict[str, Any]:
        """A copy has other memory than the table points to."""
        return {name: value for name, value in vars(self).items() if name != "_table"}

    @cached_property
    def _table(self) -> ctypes.Array[kernels.Layer] | None:
        """The layers as the kernels take them; None where one is in another layout than theirs."""
        found = []
        for layer in self.layers:
            linears = (layer.qkv, layer.out, layer.gate_up, layer.down)
            norms = (layer.attn_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
            weights = [
                kernels.Weight.of(x.panels, x.outs, x.bias) for x in linears if x.panels is not None
            ]
            if len(weights) < len(linears) or not kernels.takes(*norms, *(x.bias for x in linears)):
                return None
            found.append(kernels.Layer(*map(kernels.address, norms), *weights))
        return (kernels.Layer * len(found))(*found)

    def _compiled(
        self,
        hidden: Tensor,
        rows: Rows,
        views: Sequence[View],
        gains: Sequence[Tensor | None],
        normed: Tensor | None,
        taps: Collection[int],
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]] | None:
        """All of it in one call, where there are kernels for it."""
        place = rows.place
        if place is None or not kernels.takes(hidden, normed, self.norm) or self._table is None:
            return None
        dim = self.layers[0].qkv.outs // (self.heads + 2 * self.kv_heads)
        if place.cached != (shape := (len(self.layers), self.kv_heads, dim)):
            raise SharpDraftError(
                f"a cache of (layers, heads, head_dim) {place.cached} for layers of {shape}"
            )
        own = place.of(self.heads, self.kv_heads, self.eps)
        return kernels.layers(self._table, own, views, gains, hidden, normed, self.norm, taps)
