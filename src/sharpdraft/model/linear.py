"""Linear layers: the weight layout that decoding needs, chosen once at load."""

from __future__ import annotations

import time
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kernels

# Up to this many rows oneDNN's blocked layout beats the plain one on CPUs; from how many on is
# measured.
_PACKED_UP_TO = 128
_PACK_FOR = 8


class Linear:
    """`x @ weight.T + bias`, the weight in the layout that is fastest where it is.

    weight: [out, in]; bias: [out] or None. Calls take x [..., in] of any floating dtype and return
    [..., out] in the weight's dtype, in which the product runs.

    On a CPU with compiled kernels float32 weights are kept in their panels and in no other way, and
    those that bfloat16 holds exactly, as most published ones are, in half the memory; the product
    is the same. Other weights on a CPU have a copy in oneDNN's blocked layout beside them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.detach().contiguous()
        self.outs, self.dtype = len(weight), weight.dtype
        self.bias = None if bias is None else bias.detach().contiguous()
        self.panels = kernels.in_panels(weight)
        self.plain = weight if self.panels is None else None
        self.packed: Tensor | None = None
        if (
            self.plain is not None
            and weight.device.type == "cpu"
            and _onednn()
            and _fast(weight.dtype)
        ):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR)
            self.packed_rows = range(packed_from(weight.dtype), _PACKED_UP_TO + 1)

    @property
    def weight(self) -> Tensor:
        """The weight [out, in]; a copy, made at every call, where panels are what is kept."""
        if self.plain is not None:
            return self.plain
        assert self.panels is not None
        return self.panels.transpose(1, 2).flatten(0, 1)[: self.outs].to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype).contiguous()
        if (
            self.panels is not None
            and (out := kernels.linear(x, self.panels, self.outs, self.bias)) is not None
        ):
            return out
        if self.packed is not None and x.numel() // x.shape[-1] in self.packed_rows:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def gated_mlp(x: Tensor, gate_up: Linear, down: Linear) -> Tensor:
    """The feed-forward of Llama's family: gate and up projection are one product."""
    return down(kernels.gated(gate_up(x)))


@cache
def packed_from(dtype: torch.dtype) -> int:
    """Rows from which on oneDNN's blocked layout is faster here than the plain one, 1 to 3:
    measured once in a process.

    The weights measured on are larger together than a cache.
    """
    rng = torch.Generator().manual_seed(0)  # The global one is the caller's.
    weights = [torch.randn(1536, 1536, generator=rng).to(dtype) for _ in range(8)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR) for weight in weights]
    for rows in (1, 2):
        x = torch.randn(rows, 1536, generator=rng).to(dtype)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(9):
            for blocked, times in seconds.items():
                began = time.perf_counter()
                for plain, reordered in zip(weights, packed, strict=True):
                    if blocked:
                        torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")
                    else:
                        F.linear(x, plain)
                times.append(time.perf_counter() - began)
        # The fastest of each: other work on the machine only ever adds.
        if min(seconds[True]) < min(seconds[False]):
            return rows
    return 3


def _fast(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and fast_bfloat16(torch.device("cpu"))
    )


def fast_bfloat16(device: torch.device) -> bool:
    """Whether a device has units that multiply bfloat16 matrices faster than float32 ones."""
    if device.type == "cpu":
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return device.type == "cuda"


def _onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
