"""The steps of decoding, each by a kernel where there is one for its tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...method import visible
from ..cache import KVCache
from . import build, structs
from .structs import POINTER, Layer, Pass, Request, Run, Weight, address

_REAL = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Place:
    """Where rows stand, as the kernels take it. turns: cosines and sines, float32 [rows of all of a
    batch, dim]; cached: layers, heads and head_dim of their caches."""

    requests: ctypes.Array[Request]
    turns: tuple[Tensor, Tensor]
    cached: tuple[int, int, int]

    def of(self, heads: int, kv_heads: int, eps: float) -> Pass:
        """A pass of the rows through layers with such heads."""
        rows, dim = self.turns[0].shape
        turns = (turn.data_ptr() for turn in self.turns)
        return Pass(len(self.requests), self.requests, rows, heads, kv_heads, dim, *turns, eps)


def takes(*tensors: Tensor | None) -> bool:
    """Whether kernels may read and write these: float32 on the CPU, one row behind the other, no
    gradients, and real memory, which subclasses need not have."""
    if torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor is not None and not (
            type(tensor) in _REAL
            and tensor.is_cpu
            and tensor.dtype == torch.float32
            and tensor.is_contiguous()
        ):
            return False
    return True


def requests(
    caches: Sequence[KVCache], starts: Sequence[int], counts: Sequence[int]
) -> ctypes.Array[Request] | None:
    """One for every cache, or for every row of a single cache's batch; None where kernels are not
    made for them. starts: slot of each one's first new row."""
    if (
        any(not takes(each.keys) for each in caches)
        or build.library_for(caches[0].keys.shape[-1]) is None
    ):
        return None
    found = []
    for each, start, count in zip(caches, starts, counts, strict=True):
        layer, batch, head = each.keys.stride()[:3]
        keys, values = each.keys.data_ptr(), each.values.data_ptr()
        for offset in range(0, 4 * batch * each.keys.shape[1], 4 * batch):
            found.append(Request(keys + offset, values + offset, layer, head, start, count))
    return (Request * len(found))(*found)


def attend(
    place: Place,
    layer: int,
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    view: visible.View,
    norms: tuple[Tensor, Tensor, float] | None,
    gain: Tensor | None,
) -> Tensor:
    """All of attention between the projections; see `Rows.attention`. qkv is overwritten."""
    qkv = qkv.contiguous()
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    own = place.of(heads, kv_heads, eps)
    mixed = qkv.new_empty(*qkv.shape[:2], heads * own.dim)
    kernels = build.library_for(own.dim)
    assert kernels is not None
    gain = _of_batch(gain, len(qkv))
    kernels.sharpdraft_attend(
        ctypes.byref(own),
        layer,
        structs.views((view,)),
        address(q_norm),
        address(k_norm),
        ctypes.byref(structs.gain_of(gain)),
        qkv.data_ptr(),
        mixed.data_ptr(),
    )
    return mixed


def layers(
    table: ctypes.Array[Layer],
    own: Pass,
    views: Sequence[visible.View],
    gains: Sequence[Tensor | None],
    hidden: Tensor,
    normed: Tensor | None,
    norm: Tensor,
    taps: Collection[int],
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """All of a pass between embedding and head; see `Stack.run`. norm: weight of the norm behind
    the last layer. The tensors are such as `takes` says."""
    kernels = build.library_for(own.dim)
    assert kernels is not None
    if len(hidden) > 1:
        repeated = {id(gain): _of_batch(gain, len(hidden)) for gain in gains}
        gains = [repeated[id(gain)] for gain in gains]
    final = torch.empty_like(hidden)
    tapped = {layer: torch.empty_like(hidden) for layer in taps}
    pointers = (hidden.data_ptr(), address(normed), norm.data_ptr(), final.data_ptr())
    run = Run(
        len(table),
        table,
        structs.views(tuple(views)),
        structs.gains(gains),
        hidden.shape[-1],
        *pointers,
        (POINTER * len(table))(*(address(tapped.get(layer)) for layer in range(len(table)))),
    )
    kernels.sharpdraft_layers(ctypes.byref(own), ctypes.byref(run))
    return hidden, final, tapped


def add_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`hidden + delta`, perhaps in the memory of `hidden`, and its root mean square norm; all [...,
    size]."""
    if takes(hidden, delta, weight) and (kernels := build.widest()) is not None:
        size = hidden.shape[-1]
        normed = torch.empty_like(hidden)
        rows = hidden.numel() // size
        pointers = hidden.data_ptr(), address(delta), weight.data_ptr()
        kernels.sharpdraft_add_norm(*pointers, eps, rows, size, normed.data_ptr())
        return hidden, normed
    if delta is not None:
        hidden = hidden + delta
    return hidden, F.rms_norm(hidden, hidden.shape[-1:], weight, eps)


def gated(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of [..., 2 * size], gates first."""
    if takes(gate_up) and (kernels := build.widest()) is not None:
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        rows = gate_up.numel() // (2 * size)
        kernels.sharpdraft_gated(gate_up.data_ptr(), rows, size, out.data_ptr())
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def in_panels(weight: Tensor) -> Tensor | None:
    """A float32 weight [outs, in] in the layout of `linear`: [panels, in, outs of a panel], the
    last filled up with zeros; as bfloat16 if that holds it exactly, which is half the memory. None
    where kernels are not made for it."""
    if (
        type(weight) not in _REAL
        or not weight.is_cpu
        or weight.dtype != torch.float32
        or build.widest() is None
    ):
        return None
    # The first row tells of nearly every weight that bfloat16 does not hold it.
    if all(torch.equal(part.bfloat16().float(), part) for part in (weight[:1], weight)):
        weight = weight.bfloat16()
    if missing := -len(weight) % build.panel():
        weight = F.pad(weight, (0, 0, 0, missing))
    return weight.unflatten(0, (-1, build.panel())).transpose(1, 2).contiguous()


def linear(x: Tensor, panels: Tensor, outs: int, bias: Tensor | None) -> Tensor | None:
    """`x @ weight.T + bias` in float32 for x [..., in] and a weight [outs, in] as `in_panels` lays
    it out; None where kernels are not made for them."""
    if not takes(x, bias) or (kernels := build.widest()) is None:
        return None
    out = x.new_empty(*x.shape[:-1], outs)
    weight = ctypes.byref(Weight.of(panels, outs, bias))
    kernels.sharpdraft_linear(weight, x.data_ptr(), x.numel() // x.shape[-1], out.data_ptr())
    return out


def _of_batch(gain: Tensor | None, batch: int) -> Tensor | None:
    """The gain of all rows of all sequences of a batch."""
    return gain if gain is None or batch == 1 else gain.repeat(batch)
