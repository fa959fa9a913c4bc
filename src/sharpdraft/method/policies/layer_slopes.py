"""A slope for each layer: the deployed rule where layers' contrast curves differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..registry import register
from .fixed_slope import FixedSlope


@register("scale", "layer_slopes", "slopes")
@dataclass(frozen=True)
class LayerSlopes:
    """`FixedSlope` with a slope of its own for each drafter layer, such as the derivatives of the
    layers' contrast curves (the effective denominators of arXiv 2610.05106).

    Costs what one slope costs: hosts take each layer's policy once, when settings are put on.

    Args:
        reference: N0, in Keys, of all layers.
        slopes: s of each layer, first layer first.
        top_k, max_scale: as in `FixedSlope`, of all layers.

    Raises:
        ValueError: `slopes` is empty or no tuple, or a field is out of range.
    """

    needs: ClassVar[tuple[str, ...]] = ("keys", "layer")

    reference: int
    slopes: tuple[float, ...]
    top_k: int = 32
    max_scale: float = math.exp(0.5)

    def __post_init__(self) -> None:
        if not isinstance(self.slopes, tuple) or not self.slopes:
            raise ValueError(f"slopes must name a slope for each layer, got {self.slopes!r}")
        for layer in range(self.layers):
            self.at(layer)

    @property
    def layers(self) -> int:
        """How many layers it is for."""
        return len(self.slopes)

    def at(self, layer: int) -> FixedSlope:
        """The policy of one layer, 0 being the first."""
        return FixedSlope(self.reference, self.slopes[layer], self.top_k, self.max_scale)

    def describe(self) -> str:
        """The rule in one line."""
        each = ", ".join(f"{slope:g}" for slope in self.slopes)
        return (
            f"a slope for each layer: N0 = {self.reference}, k = {self.top_k}, s = {each}, "
            f"cap {self.max_scale:.3f}"
        )
