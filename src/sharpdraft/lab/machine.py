"""What figures were measured on."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from ..model.kernels import widest


def machine() -> dict[str, Any]:
    """The processor or GPU, threads, whether the kernels of this package ran, and versions."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "threads": torch.get_num_threads(),
        "kernels": widest() is not None,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


@cache
def _processor() -> str:
    try:
        # py-cpuinfo takes over a second to answer, psutil does not know the name.
        from archspec.cpu import brand_string  # type: ignore[import-untyped]
    except ImportError:
        return platform.processor() or platform.machine()
    return str(brand_string() or platform.machine())
