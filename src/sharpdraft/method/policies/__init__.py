"""Policies: one file a kind, registered under the name that settings use."""

from .constant import Constant
from .fixed_slope import REPORTED_SETTINGS, FixedSlope
from .layer_slopes import LayerSlopes

__all__ = ["REPORTED_SETTINGS", "Constant", "FixedSlope", "LayerSlopes"]
