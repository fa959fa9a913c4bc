"""What policies check of their fields and of counts."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def require_integer(name: str, value: object) -> None:
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, got {value!r}")


def require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")


def require_counts(keys: Tensor) -> None:
    if keys.dtype == torch.bool or keys.is_complex():
        raise TypeError(
            f"keys must be counts of visible Keys, got {keys.dtype}: for a mask, pass "
            "mask_keys(mask)"
        )
