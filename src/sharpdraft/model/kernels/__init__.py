"""The compiled steps of decoding on a CPU: built once for the machine at hand, and never required.

Where there is no C++ compiler, and for dtypes, devices and shapes that they are not made for, the
same steps run as PyTorch operations, slower.
"""

from .build import library, widest
from .calls import Place, add_norm, attend, gated, in_panels, layers, linear, requests, takes
from .structs import Layer, Weight, address

__all__ = [
    "Layer",
    "Place",
    "Weight",
    "add_norm",
    "address",
    "attend",
    "gated",
    "in_panels",
    "layers",
    "library",
    "linear",
    "requests",
    "takes",
    "widest",
]
