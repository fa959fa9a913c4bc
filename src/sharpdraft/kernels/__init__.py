"""The compiled steps of decoding on a CPU: built once for the machine at hand, and never required.

Where there is no C++ compiler, and for dtypes, devices and shapes that they are not made for, the same steps run as
PyTorch operations, slower on long contexts.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decode.cache import KVCache
from ..paths import cache_dir

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("cpu.cpp")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
_REAL = (Tensor, torch.nn.Parameter)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Request(ctypes.Structure):
    """Where new rows of one request stand: `Request` of cpu.cpp."""

    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("layer_stride", _INT),
        ("head_stride", _INT),
        ("start", _INT),
        ("count", _INT),
    )


@cache
def lanes(dim: int) -> int:
    """Floats of a vector for heads of `dim`, 0 where there is no vector for them."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return 16 if wide and dim % 16 == 0 else 8 if dim % 8 == 0 else 0


@cache
def library(lanes: int) -> ctypes.CDLL | None:
    """The compiled kernels, built if this machine has not built them yet; None where that is not possible."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        _log.warning("no C++ compiler: attention runs as PyTorch operations, slower on long contexts")
        return None
    try:
        built = ctypes.CDLL(str(_build(compiler, lanes)))
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        _log.warning("kernels could not be built, attention runs as PyTorch operations: %s", said.strip()[-500:])
        return None
    built.sharpdraft_attend.argtypes = [
        *(_INT, _POINTER, _INT, _POINTER, _INT, _INT, _INT),
        *(_POINTER, _POINTER, ctypes.c_float, _POINTER, _INT, _POINTER, _POINTER, ctypes.c_int, _INT, _POINTER),
    ]
    built.sharpdraft_add_norm.argtypes = [_POINTER, _POINTER, _POINTER, ctypes.c_float, _INT, _INT, _POINTER]
    built.sharpdraft_gated.argtypes = [_POINTER, _INT, _INT, _POINTER]
    built.sharpdraft_linear.argtypes = [_POINTER, _POINTER, ctypes.c_int, _POINTER, _INT, _INT, _INT, _POINTER]
    return built


def _build(compiler: str, lanes: int) -> Path:
    flags = (*_FLAGS, f"-DLANES={lanes}")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    # A home directory may be shared by machines that know different instructions.
    info = Path("/proc/cpuinfo")
    known = (
        [line for line in info.read_text().splitlines() if "lags" in line or "eatures" in line][:1]
        if info.exists()
        else []
    )
    made_from = repr((_SOURCE.read_text(encoding="utf-8"), flags, version, platform.machine(), known))
    path = cache_dir() / "kernels" / f"cpu-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            subprocess.run(
                [compiler, *flags, "-o", str(made), str(_SOURCE)], check=True, capture_output=True, text=True
            )
            made.replace(path)
    return path


def _plain(*tensors: Tensor | None) -> bool:
    """Whether kernels may read and write these: float32 on the CPU, one row behind the other, no gradients, and real
    memory, which subclasses need not have."""
    if torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor is not None and not (
            type(tensor) in _REAL and tensor.is_cpu and tensor.dtype == torch.float32 and tensor.is_contiguous()
        ):
            return False
    return True


def requests(caches: Sequence[KVCache], starts: Sequence[int], counts: Sequence[int]) -> ctypes.Array[Request] | None:
    """Requests for `attend`, one for every cache, or for every row of a single cache's batch; None where kernels are
    not made for them."""
    if any(not _plain(each.keys) for each in caches) or library_for(caches[0].keys.shape[-1]) is None:
        return None
    found = []
    for each, start, count in zip(caches, starts, counts, strict=True):
        layer, batch, head = each.keys.stride()[:3]
        keys, values = each.keys.data_ptr(), each.values.data_ptr()
        for offset in range(0, 4 * batch * each.keys.shape[1], 4 * batch):
            found.append(Request(keys + offset, values + offset, layer, head, start, count))
    return (Request * len(found))(*found)


def widest() -> ctypes.CDLL | None:
    """The kernels with the widest vectors there are, for steps that take rows of any size."""
    return library_for(16)


def library_for(dim: int) -> ctypes.CDLL | None:
    """The kernels for heads of `dim`."""
    width = lanes(dim)
    return library(width) if width else None


def attend(
    requests: ctypes.Array[Request],
    layer: int,
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
    gain: Tensor | None,
    turns: tuple[Tensor, Tensor],
    causal: bool,
    window: int | None,
) -> Tensor:
    """All of attention between the projections; see `Segments.attention`. qkv is overwritten."""
    qkv = qkv.contiguous()
    dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    mixed = qkv.new_empty(*qkv.shape[:2], heads * dim)
    kernels = library_for(dim)
    assert kernels is not None
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    kernels.sharpdraft_attend(
        len(requests),
        requests,
        layer,
        qkv.data_ptr(),
        heads,
        kv_heads,
        dim,
        _at(q_norm),
        _at(k_norm),
        eps,
        _at(gain),
        0 if gain is None else gain.stride(0),
        turns[0].data_ptr(),
        turns[1].data_ptr(),
        causal,
        window or 0,
        mixed.data_ptr(),
    )
    return mixed


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`hidden + delta`, perhaps in the memory of `hidden`, and its root mean square norm; all [..., size]."""
    if _plain(hidden, delta, weight) and (kernels := widest()) is not None:
        size = hidden.shape[-1]
        normed = torch.empty_like(hidden)
        rows = hidden.numel() // size
        kernels.sharpdraft_add_norm(
            hidden.data_ptr(), _at(delta), weight.data_ptr(), eps, rows, size, normed.data_ptr()
        )
        return hidden, normed
    if delta is not None:
        hidden = hidden + delta
    return hidden, F.rms_norm(hidden, hidden.shape[-1:], weight, eps)


def gated(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of [..., 2 * size], gates first."""
    if _plain(gate_up) and (kernels := widest()) is not None:
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        kernels.sharpdraft_gated(gate_up.data_ptr(), gate_up.numel() // (2 * size), size, out.data_ptr())
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """`x @ weight.T + bias` in float32 for a few rows x [..., in] and weight [out, in], float32 or bfloat16; None where
    kernels are not made for them."""
    outs, size = weight.shape
    kernels = library_for(size)
    if kernels is None or not _plain(x, bias):
        return None
    out = x.new_empty(*x.shape[:-1], outs)
    narrow = weight.dtype == torch.bfloat16
    kernels.sharpdraft_linear(
        x.data_ptr(), weight.data_ptr(), narrow, _at(bias), x.numel() // size, size, outs, out.data_ptr()
    )
    return out


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
