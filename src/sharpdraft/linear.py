"""Linear layers for few rows: the weight layouts that decoding needs, chosen once at load."""

from __future__ import annotations

import time
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kernels

# Up to this many rows oneDNN's blocked layout beats the plain one on CPUs; from how many on is measured.
_PACKED_UP_TO = 128
_PACK_FOR = 8
# More rows than these are compute-bound, which is oneDNN's business.
_KERNEL_UP_TO = 8


class Linear:
    """`x @ weight.T + bias`, with what makes it fast for few rows on a CPU: the compiled kernel, and an extra copy of
    the weights in oneDNN's blocked layout.

    weight: [out, in]; bias: [out] or None. Calls take x [..., in] of any floating dtype and return [..., out]
    in the weight's dtype, in which the product runs. float32 weights that bfloat16 holds exactly, as most published
    ones are, are read as such, which is half the memory; the product is the same.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = True) -> None:
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach()
        self.packed: Tensor | None = None
        self.narrow: Tensor | None = None
        if pack and weight.device.type == "cpu" and _onednn() and _fast(weight.dtype):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_FOR)
            self.packed_rows = range(packed_from(weight.dtype), _PACKED_UP_TO + 1)
        if pack and weight.device.type == "cpu" and weight.dtype == torch.float32:
            narrow = self.weight.bfloat16()
            self.narrow = narrow if torch.equal(narrow.float(), self.weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        x, rows = x.to(self.weight.dtype), x.numel() // x.shape[-1]
        blocked = self.packed is not None and rows in self.packed_rows
        if rows <= _KERNEL_UP_TO and (self.narrow is not None or not blocked):
            weight = self.weight if self.narrow is None else self.narrow
            if (out := kernels.linear(x, weight, self.bias)) is not None:
                return out
        if blocked:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def gated_mlp(x: Tensor, gate_up: Linear, down: Linear) -> Tensor:
    """The feed-forward of Llama's family: gate and up projection are one product."""
    return down(kernels.gated(gate_up(x)))


@cache
@torch.no_grad()  # Kernels do not run where gradients are recorded.
def packed_from(dtype: torch.dtype = torch.float32) -> int:
    """Rows from which on the blocked layout is faster here than the plain one, 1 to 3: measured once in a process.

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
                    elif dtype != torch.float32 or kernels.linear(x, plain, None) is None:
                        F.linear(x, plain)
                times.append(time.perf_counter() - began)
        # The fastest of each: other work on the machine only ever adds.
        if min(seconds[True]) < min(seconds[False]):
            return rows
    return 3


def _fast(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or (dtype == torch.bfloat16 and fast_bfloat16(torch.device("cpu")))


def fast_bfloat16(device: torch.device) -> bool:
    """Whether a device has units that multiply bfloat16 matrices faster than float32 ones."""
    if device.type == "cpu":
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return device.type == "cuda"


def _onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
