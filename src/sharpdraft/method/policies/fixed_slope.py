"""The deployed rule: a first-order inverse of the reference curve (arXiv 2610.05106)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ..registry import register
from .checks import require_counts, require_integer, require_positive


@register("scale", "fixed_slope", "sharpdraft")
@dataclass(frozen=True)
class FixedSlope:
    """The deployed rule: `β(N) = min(β_max, 1 + log(r)/s)`, `r = max((N - k)/(N0 - k), 1)`; arXiv
    2610.05106.

    At and below `reference` Keys the gain is exactly zero; that includes rows with `top_k` Keys or
    fewer.

    Args:
        reference: N0, the Key count up to which the drafter is left as released, in Keys.
        slope: s, what the slope `F'(1)` of the log-contrast curve is taken to be; larger scales
            less.
        top_k: k, the size of the group of Keys whose attention mass is to be kept, in Keys.
        max_scale: β_max, the cap on the scale.

    Raises:
        ValueError: a field has the wrong type or lies outside its range.
    """

    reference: int
    slope: float = 5.0
    top_k: int = 32
    max_scale: float = math.exp(0.5)

    def __post_init__(self) -> None:
        require_integer("reference", self.reference)
        require_integer("top_k", self.top_k)
        require_positive("slope", self.slope)
        require_positive("max_scale", self.max_scale)
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.reference <= self.top_k:
            raise ValueError(
                f"reference (N0) must be above top_k, got reference={self.reference}, "
                f"top_k={self.top_k}: the competitor ratio (N - k)/(N0 - k) needs Keys outside the "
                "top group. Raise reference, usually to about the length the drafter was trained "
                "at, or lower top_k"
            )
        if self.max_scale < 1:
            raise ValueError(
                f"max_scale must be at least 1 (1 switches scaling off), got {self.max_scale}"
            )

    def gain(self, keys: Tensor) -> Tensor:
        """Gain `β(N) - 1` for each count.

        Args:
            keys: visible Keys N of each Query row, any shape, integer or floating.

        Returns:
            float32 of the shape and on the device of `keys`, in `[0, max_scale - 1]`.

        Raises:
            TypeError: `keys` is boolean or complex.
        """
        require_counts(keys)
        # Subtracting whole counts before the move to float32 keeps N0 + 1 apart from N0 at any
        # length, and close to N0 log1p of the excess keeps the digits that log of the ratio would
        # lose.
        counts = keys.float() if keys.is_floating_point() else keys.long()
        excess = (counts - self.reference).clamp(min=0).float() / (self.reference - self.top_k)
        return (torch.log1p(excess) / self.slope).clamp(max=self.max_scale - 1)

    def scale(self, keys: Tensor) -> Tensor:
        """Scale `β(N) = 1 + gain(keys)`: float32 of the shape of `keys`; for reading, not for
        applying."""
        return 1 + self.gain(keys)

    def describe(self) -> str:
        """The rule in one line."""
        return (
            f"fixed slope: N0 = {self.reference}, k = {self.top_k}, s = {self.slope:g}, "
            f"cap {self.max_scale:.3f}"
        )


REPORTED_SETTINGS: Mapping[str, FixedSlope] = MappingProxyType(
    {"dflash": FixedSlope(2048), "dflash-glm": FixedSlope(4096), "pard": FixedSlope(8192)}
)
"""Settings reported in arXiv 2610.05106; `dflash` is for the Qwen3-4B, Qwen3-8B and Llama-3.1-8B
drafters. EAGLE 3.1 has no entry, as its reference is not in our sources. Other drafters need their
own validation."""
