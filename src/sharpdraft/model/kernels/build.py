"""Building the kernels: once for the machine at hand, for each width of vectors."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from ...paths import cache_dir
from .structs import INT, POINTER

_log = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent
# One unit, so that everything may be inlined: it includes the headers.
_UNIT = _FOLDER / "layers.cpp"
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
_FLOAT = ctypes.c_float
_CALLS = {
    "sharpdraft_layers": (POINTER, POINTER),
    "sharpdraft_attend": (POINTER, INT, *(POINTER,) * 6),
    "sharpdraft_linear": (POINTER, POINTER, INT, POINTER),
    "sharpdraft_add_norm": (POINTER, POINTER, POINTER, _FLOAT, INT, INT, POINTER),
    "sharpdraft_gated": (POINTER, INT, INT, POINTER),
}


@cache
def lanes(dim: int) -> int:
    """Floats of a vector for heads of `dim`, 0 where there is no vector for them."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return 16 if wide and dim % 16 == 0 else 8 if dim % 8 == 0 else 0


def panel() -> int:
    """Outputs of a linear layer that lie side by side: two of the widest vectors, whichever a
    library works with."""
    return 2 * lanes(16)


def widest() -> ctypes.CDLL | None:
    """The kernels with the widest vectors there are, for steps that take rows of any size."""
    return library_for(16)


def library_for(dim: int) -> ctypes.CDLL | None:
    """The kernels for heads of `dim`."""
    width = lanes(dim)
    return library(width) if width else None


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
    for name, arguments in _CALLS.items():
        call = getattr(built, name)
        call.argtypes, call.restype = arguments, None
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
    sources = [
        (path.name, path.read_text(encoding="utf-8"))
        for path in sorted([*_FOLDER.glob("*.h"), *_FOLDER.glob("*.cpp")])
    ]
    made_from = repr((sources, flags, version, platform.machine(), known))
    name = f"cpu-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
    path = cache_dir() / "kernels" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / name
            subprocess.run(
                [compiler, *flags, "-o", str(made), str(_UNIT)],
                check=True,
                capture_output=True,
                text=True,
            )
            made.replace(path)
    return path
