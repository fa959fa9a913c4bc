"""Rotary positions: tables made once, and turning Queries and Keys by them.

Frequencies are those of transformers' modules, to the bit; computed here, as those come with all of
its modelling code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import SharpDraftError
from .config import Config

_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
ROPE_TYPES = tuple(_NEEDS)
"""Scalings whose frequencies do not change with the length of a text."""


class Rotary:
    """Cosines and sines of every position, float32 [positions, head_dim]; apply by slicing."""

    def __init__(
        self,
        frequencies: Tensor,
        scale: float,
        positions: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """frequencies: radians a position, float32 [head_dim / 2]; scale: factor on all tables."""
        angles = torch.arange(positions)[:, None].float() * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        # The first half of the sine turns the second half of the vector the other way round: its
        # sign is stored so that applying is one multiply and one addcmul.
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)


def rotary_of(config: Config, positions: int, device: torch.device | str = "cpu") -> Rotary:
    """The tables of a model or drafter for its first `positions` positions. Raises SharpDraftError
    for a rope_type that is not one of ROPE_TYPES, and for one that lacks a parameter."""
    return Rotary(*frequencies(config), positions, device)


def frequencies(config: Config) -> tuple[Tensor, float]:
    """Radians a position, float32 [head_dim / 2], and the factor on cosines and sines. Raises
    SharpDraftError as rotary_of does."""
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise SharpDraftError(
            f"rotary positions of type '{kind}' are not supported; supported: "
            f"{', '.join(ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise SharpDraftError("rotary positions on a part of each head are not supported")
    for name in _NEEDS[kind]:
        if isinstance(value := rope.get(name), bool) or not isinstance(value, int | float):
            raise SharpDraftError(
                f"rotary positions of type '{kind}' need a number {name}, got {value!r}"
            )
    powers = rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    if kind == "linear":
        return (1.0 / powers) / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(1.0 / powers, rope), 1.0
    if kind == "yarn":
        return _yarn(powers, rope)
    return 1.0 / powers, 1.0


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's: slow dimensions are slowed by `factor`, fast ones kept, others blended."""
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wave = 2 * math.pi / plain
    slowed = torch.where(wave > length / low, plain / factor, plain)
    share = (length / wave - low) / (high - low)
    between = (wave >= length / high) & (wave <= length / low)
    return torch.where(between, (1 - share) * slowed / factor + share * slowed, slowed)


def _yarn(powers: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071)."""
    base, factor = rope["rope_theta"], rope["factor"]
    length, dim = rope["original_max_position_embeddings"], 2 * len(powers)

    def dimension(turns: float) -> float:
        """Where a pair of dimensions turns so many times within the length of pretraining."""
        return (dim * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(base))

    low = dimension(rope.get("beta_fast") or 32)
    high = dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    mixed = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return mixed, _yarn_scale(rope)


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    """The factor on cosines and sines, which makes attention as sharp as at the old length."""

    def scale(weight: float) -> float:
        factor = rope["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    one, other = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(one) / scale(other) if one and other else scale(1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate x [..., rows, head_dim] by rows of a Rotary's tables, in the dtype of x."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos.to(x.dtype), swapped, signed_sin.to(x.dtype))
