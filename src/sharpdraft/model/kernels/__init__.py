"""The compiled steps of decoding on a CPU: built once for the machine at hand, and never required.

Where there is no C++ compiler, and for dtypes, devices and shapes that they are not made for, the
same steps run as PyTorch operations, slower.
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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...paths import cache_dir
from ..cache import KVCache

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


class Weight(ctypes.Structure):
    """A linear layer: `Weight` of cpu.cpp."""

    _fields_ = (
        ("panels", _POINTER),
        ("bias", _POINTER),
        ("narrow", _INT),
        ("ins", _INT),
        ("outs", _INT),
    )

    @classmethod
    def of(cls, panels: Tensor, outs: int, bias: Tensor | None) -> Weight:
        """Of `panels` and bias, which must be kept for as long as this is used."""
        return cls(
            panels.data_ptr(), _at(bias), panels.dtype == torch.bfloat16, panels.shape[1], outs
        )


class Layer(ctypes.Structure):
    """Norms, linear layers and what rows see: `Layer` of cpu.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("attn_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, Weight) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _INT) for name in ("causal", "window", "kind")),
    )


@dataclass(frozen=True)
class Place:
    """Where rows stand, as the kernels take it. turns: cosines and sines, float32 [rows of all of a
    batch, dim]; cached: layers, heads and head_dim of their caches."""

    requests: ctypes.Array[Request]
    turns: tuple[Tensor, Tensor]
    cached: tuple[int, int, int]


@cache
def lanes(dim: int) -> int:
    """Floats of a vector for heads of `dim`, 0 where there is no vector for them."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return 16 if wide and dim % 16 == 0 else 8 if dim % 8 == 0 else 0


def panel() -> int:
    """Outputs of a linear layer that lie side by side: two of the widest vectors, whichever a
    library works with."""
    return 2 * lanes(16)


@cache
def library(lanes: int) -> ctypes.CDLL | None:
    """The compiled kernels, built if this machine has not built them yet; None where that is not
    possible."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        _log.warning("no C++ compiler: decoding runs as PyTorch operations, slower")
        return None
    try:
        built = ctypes.CDLL(str(_build(compiler, lanes)))
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        _log.warning(
            "kernels could not be built, decoding runs as PyTorch operations: %s",
            said.strip()[-500:],
        )
        return None
    built.sharpdraft_attend.argtypes = [
        *(_INT, _POINTER, _INT, _POINTER, _INT, _INT, _INT),
        *(
            _POINTER,
            _POINTER,
            ctypes.c_float,
            _POINTER,
            _INT,
            _POINTER,
            _POINTER,
            ctypes.c_int,
            _INT,
            _POINTER,
        ),
    ]
    built.sharpdraft_layers.argtypes = [
        *(_INT, _POINTER, _INT, _INT, _INT, _INT, ctypes.c_float, _POINTER, _INT, _POINTER),
        *(_INT, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
    ]
    built.sharpdraft_add_norm.argtypes = [
        _POINTER,
        _POINTER,
        _POINTER,
        ctypes.c_float,
        _INT,
        _INT,
        _POINTER,
    ]
    built.sharpdraft_gated.argtypes = [_POINTER, _INT, _INT, _POINTER]
    built.sharpdraft_linear.argtypes = [_POINTER, _POINTER, _INT, _POINTER]
    return built


def _build(compiler: str, lanes: int) -> Path:
    flags = (*_FLAGS, f"-DLANES={lanes}", f"-DPANEL={panel()}")
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True
    ).stdout
    # A home directory may be shared by machines that know different instructions.
    info = Path("/proc/cpuinfo")
    known = (
        [line for line in info.read_text().splitlines() if "lags" in line or "eatures" in line][:1]
        if info.exists()
        else []
    )
    made_from = repr(
        (_SOURCE.read_text(encoding="utf-8"), flags, version, platform.machine(), known)
    )
    path = cache_dir() / "kernels" / f"cpu-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            subprocess.run(
                [compiler, *flags, "-o", str(made), str(_SOURCE)],
                check=True,
                capture_output=True,
                text=True,
            )
            made.replace(path)
    return path


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
    """Requests for `attend`, one for every cache, or for every row of a single cache's batch; None
    where kernels are not made for them."""
    if (
        any(not takes(each.keys) for each in caches)
        or library_for(caches[0].keys.shape[-1]) is None
    ):
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
    place: Place,
    layer: int,
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
    gain: Tensor | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    """All of attention between the projections; see `Rows.attention`. qkv is overwritten."""
    qkv = qkv.contiguous()
    dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    mixed = qkv.new_empty(*qkv.shape[:2], heads * dim)
    kernels = library_for(dim)
    assert kernels is not None
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    gain = _of_batch(gain, len(qkv))
    kernels.sharpdraft_attend(
        len(place.requests),
        place.requests,
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
        *(turn.data_ptr() for turn in place.turns),
        causal,
        window or 0,
        mixed.data_ptr(),
    )
    return mixed


def add_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`hidden + delta`, perhaps in the memory of `hidden`, and its root mean square norm; all [...,
    size]."""
    if takes(hidden, delta, weight) and (kernels := widest()) is not None:
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
    if takes(gate_up) and (kernels := widest()) is not None:
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        kernels.sharpdraft_gated(
            gate_up.data_ptr(), gate_up.numel() // (2 * size), size, out.data_ptr()
        )
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
        or widest() is None
    ):
        return None
    if torch.equal(weight.bfloat16().float(), weight):
        weight = weight.bfloat16()
    if missing := -len(weight) % panel():
        weight = F.pad(weight, (0, 0, 0, missing))
    return weight.unflatten(0, (-1, panel())).transpose(1, 2).contiguous()


def linear(x: Tensor, panels: Tensor, outs: int, bias: Tensor | None) -> Tensor | None:
    """`x @ weight.T + bias` in float32 for x [..., in] and a weight [outs, in] as `in_panels` lays
    it out; None where kernels are not made for them."""
    if not takes(x, bias) or (kernels := widest()) is None:
        return None
    out = x.new_empty(*x.shape[:-1], outs)
    weight = Weight.of(panels, outs, bias)
    kernels.sharpdraft_linear(
        ctypes.byref(weight), x.data_ptr(), x.numel() // x.shape[-1], out.data_ptr()
    )
    return out


def layers(
    table: ctypes.Array[Layer],
    place: Place,
    heads: int,
    kv_heads: int,
    norm: Tensor,
    eps: float,
    gains: Sequence[Tensor | None],
    hidden: Tensor,
    normed: Tensor | None,
    taps: Collection[int],
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """All of a pass between embedding and head; see `Stack.run`. gains: float32 [rows] or None, one
    for each kind of layer. The tensors are such as `takes` says."""
    dim = place.turns[0].shape[-1]
    kernels = library_for(dim)
    assert kernels is not None
    gains = [_of_batch(gain, len(hidden)) for gain in gains]
    final = torch.empty_like(hidden)
    tapped = {layer: torch.empty_like(hidden) for layer in taps}
    rows, size = hidden.numel() // hidden.shape[-1], hidden.shape[-1]
    kernels.sharpdraft_layers(
        *(len(table), table, heads, kv_heads, dim, size, eps, norm.data_ptr()),
        *(len(place.requests), place.requests, rows, *(turn.data_ptr() for turn in place.turns)),
        (_POINTER * len(gains))(*map(_at, gains)),
        (_INT * len(gains))(*(0 if gain is None else gain.stride(0) for gain in gains)),
        *(hidden.data_ptr(), _at(normed), final.data_ptr()),
        (_POINTER * len(table))(*(_at(tapped.get(layer)) for layer in range(len(table)))),
    )
    return hidden, final, tapped


def _of_batch(gain: Tensor | None, batch: int) -> Tensor | None:
    """The gain of all rows of all sequences of a batch."""
    return gain if gain is None or batch == 1 else gain.repeat(batch)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
