"""What the kernels are handed: the structures of `rows.h`, `linear.h` and `layers.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...method import visible

POINTER, INT = ctypes.c_void_p, ctypes.c_int64


class Request(ctypes.Structure):
    """Where new rows of one request stand in its cache. start: slot of the first."""

    _fields_ = (
        ("keys", POINTER),
        ("values", POINTER),
        ("layer_stride", INT),
        ("head_stride", INT),
        ("start", INT),
        ("count", INT),
    )


class View(ctypes.Structure):
    """What rows of a layer see; window: 0 for none."""

    _fields_ = (("causal", INT), ("window", INT), ("sinks", INT))


class Gain(ctypes.Structure):
    """Gains of the rows of a pass, `stride` floats apart; null for none."""

    _fields_ = (("values", POINTER), ("stride", INT))


class Pass(ctypes.Structure):
    """The rows of all requests, and the heads of the layers they pass through."""

    _fields_ = (
        ("request_count", INT),
        ("requests", ctypes.POINTER(Request)),
        *((name, INT) for name in ("rows", "heads", "kv_heads", "dim")),
        *((name, POINTER) for name in ("cosine", "sine")),
        ("eps", ctypes.c_float),
    )


class Weight(ctypes.Structure):
    """A linear layer."""

    _fields_ = (
        ("panels", POINTER),
        ("bias", POINTER),
        ("narrow", INT),
        ("ins", INT),
        ("outs", INT),
    )

    @classmethod
    def of(cls, panels: Tensor, outs: int, bias: Tensor | None) -> Weight:
        """Of `panels` and bias, which must be kept for as long as this is used."""
        return cls(
            panels.data_ptr(), address(bias), panels.dtype == torch.bfloat16, panels.shape[1], outs
        )


class Layer(ctypes.Structure):
    """Norms and linear layers."""

    _fields_ = (
        *((name, POINTER) for name in ("attn_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, Weight) for name in ("qkv", "out", "gate_up", "down")),
    )


class Run(ctypes.Structure):
    """All layers of a pass and what goes through them."""

    _fields_ = (
        ("layer_count", INT),
        ("layers", ctypes.POINTER(Layer)),
        ("views", ctypes.POINTER(View)),
        ("gains", ctypes.POINTER(Gain)),
        ("size", INT),
        *((name, POINTER) for name in ("hidden", "normed", "final_norm", "final")),
        ("tapped", ctypes.POINTER(POINTER)),
    )


@lru_cache(maxsize=256)
def views(of: tuple[visible.View, ...]) -> ctypes.Array[View]:
    """One for each layer."""
    return (View * len(of))(*(View(view.causal, view.window or 0, view.sinks) for view in of))


def gains(of: Sequence[Tensor | None]) -> ctypes.Array[Gain] | None:
    """One for each layer; None where none of them has any. The tensors must be kept for as long as
    this is used."""
    if all(gain is None for gain in of):
        return None
    made = {id(gain): gain_of(gain) for gain in of}
    return (Gain * len(of))(*(made[id(gain)] for gain in of))


def gain_of(gain: Tensor | None) -> Gain:
    """Of a tensor [rows], which must be kept for as long as this is used."""
    return Gain() if gain is None else Gain(gain.data_ptr(), gain.stride(0))


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's memory begins; None for None."""
    return None if tensor is None else tensor.data_ptr()
