"""One scale at every length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..registry import register
from .checks import require_counts, require_positive


@register("scale", "constant", "fixed")
@dataclass(frozen=True)
class Constant:
    """One scale at every length: the fixed-scale arm the paper compares with.

    Args:
        scale: β, above 0; below 1 it flattens attention.

    Raises:
        ValueError: `scale` is not a positive finite number.
    """

    scale: float

    def __post_init__(self) -> None:
        require_positive("scale", self.scale)

    def gain(self, keys: Tensor) -> Tensor:
        """Gain `scale - 1` everywhere: float32, shape and device of `keys`; errors as for
        FixedSlope."""
        require_counts(keys)
        return torch.full_like(keys, self.scale - 1, dtype=torch.float32)

    def describe(self) -> str:
        """The rule in one line."""
        return f"one scale at every length: {self.scale:g}"
