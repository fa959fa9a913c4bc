"""Rotary positions: tables made once, and turning Queries and Keys by them.

Frequencies are those of transformers' modules, to the bit; computed here, as those come with all of
its modelling code.

Dimensions that turn together lie half a head apart, and every dimension has its place in the
tables. A model that pairs neighbours, or turns a part of each head, has its Query and Key
dimensions put in that order (`head_order`) as it is read: their product is the same in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SharpDraftError
from .config import Config
from .keys import ROPE

_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),
}
ROPE_TYPES = tuple(_NEEDS)
_WHY = {
    "dynamic": " (they change with every length of the text, and each engine does it otherwise)",
    "mrope": " (they are of images and text)",
}


class Rotary:
    """Cosines and sines of every position, float32 [positions, head_dim].

    limit: with longrope, how many tokens of text `cos` and `sin` are for; a longer text has tables
    of its own. None: they are for every text.
    """

    def __init__(
        self,
        frequencies: Tensor,
        scale: float,
        positions: int,
        device: torch.device | str = "cpu",
        *,
        head_dim: int | None = None,
        longer: tuple[int, Tensor] | None = None,
    ) -> None:
        """frequencies: radians a position, float32 [rotary_dim / 2]; scale: factor on what turns.
        longer: the limit, and the frequencies of longer texts."""
        self.positions = positions
        self.limit = None if longer is None else longer[0]

        def tables(frequencies: Tensor, positions: int) -> tuple[Tensor, Tensor]:
            angles = torch.arange(positions)[:, None].float() * frequencies
            cos, sin = angles.cos() * scale, angles.sin() * scale
            if still := (head_dim or 2 * len(frequencies)) // 2 - len(frequencies):
                cos, sin = F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))
            # The first half of the sine turns the second half of the vector the other way round:
            # its sign is stored so that applying is one multiply and one addcmul.
            return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)

        self.cos, self.sin = tables(frequencies, min(positions, self.limit or positions))
        self._longer = (self.cos, self.sin) if longer is None else tables(longer[1], positions)

    def at(self, start: int, count: int, since: int | None = None) -> tuple[Tensor, Tensor]:
        """Tables of `count` positions from `start` on, [count, head_dim].

        since: with a limit, the first position that is turned as in a longer text; by default all
        are, where the last of them is beyond the limit, and else none.
        """
        end = start + count
        if self.limit is None:
            return self.cos[start:end], self.sin[start:end]
        if since is None:
            since = start if end > self.limit else self.limit
        turn = min(max(min(since, self.limit), start), end)
        parts = ((self.cos, self.sin), slice(start, turn)), (self._longer, slice(turn, end))
        cos, sin = ([table[i][span] for table, span in parts] for i in (0, 1))
        return torch.cat(cos), torch.cat(sin)


def rotary_of(config: Config, positions: int, device: torch.device | str = "cpu") -> Rotary:
    """The tables of a model or drafter for its first `positions` positions. Raises SharpDraftError
    as `frequencies` does; notes parameters that the rope_type does not know."""
    found, scale = frequencies(config)
    rope, longer = config.rope_parameters, None
    ROPE[rope["rope_type"]].check(rope, f"rotary positions of type '{rope['rope_type']}'")
    if rope["rope_type"] == "longrope":
        limit = rope["original_max_position_embeddings"]
        longer = (limit, frequencies(config, longer=True)[0])
    return Rotary(found, scale, positions, device, head_dim=config.head_dim, longer=longer)


def head_order(config: Config) -> Tensor | None:
    """Which dimension of a head, as its checkpoint has it, stands at each place, int64 [head_dim],
    so that those that turn together lie half a head apart; None where they do already."""
    dim, part = config.head_dim, config.rotary_dim
    if part == dim and not config.interleaved:
        return None
    turning = torch.arange(part).view(-1, 2).T if config.interleaved else torch.arange(part)
    halves = turning.reshape(2, -1), torch.arange(part, dim).view(2, -1)
    return torch.cat(halves, dim=1).flatten()


def in_order(rows: Tensor, order: Tensor | None, heads: int) -> Tensor:
    """A projection's weight [outs, ins] or bias [outs], or a norm's of one head, with its first
    `heads` heads in the order of `head_order`; outs behind them stay where they are."""
    if order is None:
        return rows
    count = heads * len(order)
    ordered = rows[:count].unflatten(0, (heads, len(order)))[:, order.to(rows.device)].flatten(0, 1)
    return torch.cat((ordered, rows[count:]))


def frequencies(config: Config, *, longer: bool = False) -> tuple[Tensor, float]:
    """Radians a position, float32 [rotary_dim / 2], and the factor on cosines and sines. longer: of
    texts beyond the original length, where the rope_type tells them apart.

    Raises SharpDraftError for a rope_type that is not one of ROPE_TYPES, for one that lacks a
    parameter, and for a parameter that is not supported.
    """
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        why = _WHY.get(kind, "")
        raise SharpDraftError(
            f"rotary positions of type '{kind}' are not supported{why}; supported: "
            f"{', '.join(ROPE_TYPES)}"
        )
    ROPE[kind].refuse(rope, f"rotary positions of type '{kind}'")
    for name in _NEEDS[kind]:
        _number(rope, name)
    if rope["rope_theta"] <= 1:
        raise SharpDraftError(f"rope_theta must be above 1, got {rope['rope_theta']:g}")
    dim = config.rotary_dim
    powers = rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    if kind == "longrope":
        return _longrope(powers, config, "long_factor" if longer else "short_factor")
    if kind == "linear":
        return (1.0 / powers) / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(1.0 / powers, rope), 1.0
    if kind == "yarn":
        return _yarn(powers, rope)
    return 1.0 / powers, 1.0


def has_frequencies(config: Config, stored: Tensor) -> bool:
    """Whether `rotary_emb.inv_freq`, which old checkpoints hold, is that of a configuration, before
    any scaling or behind it."""
    if not stored.is_floating_point() or tuple(stored.shape) != (config.rotary_dim // 2,):
        return False
    plain = replace(config, rope_parameters={**config.rope_parameters, "rope_type": "default"})
    close = 4 * torch.finfo(stored.dtype).eps
    # The slowest are below the smallest number that float16 holds well.
    return any(
        torch.allclose(stored.float(), frequencies(own)[0], rtol=close, atol=1e-7)
        for own in (config, plain)
    )


def _number(rope: Mapping[str, Any], name: str) -> float:
    value = rope.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SharpDraftError(
            f"rotary positions of type '{rope['rope_type']}' need a number {name} above 0, got "
            f"{value!r}"
        )
    return value


def _longrope(powers: Tensor, config: Config, name: str) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): each pair of dimensions slowed by a factor of its own."""
    rope = config.rope_parameters
    length = rope["original_max_position_embeddings"]
    factors = rope.get(name)
    if not isinstance(factors, list) or len(factors) != len(powers):
        raise SharpDraftError(
            f"rotary positions of type 'longrope' need a list {name} of {len(powers)} numbers, got "
            f"{f'{len(factors)} of them' if isinstance(factors, list) else repr(factors)}"
        )
    for each in factors:
        _number({**rope, name: each}, name)
    if length < 2:
        raise SharpDraftError(f"original_max_position_embeddings must be above 1, got {length}")
    factor = config.max_position_embeddings / length
    if rope.get("factor") is not None:
        factor = _number(rope, "factor")
    if rope.get("attention_factor") is not None:
        scale = float(_number(rope, "attention_factor"))
    else:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers), scale


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

    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if rope.get(name):
            _number(rope, name)
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

    if rope.get("attention_factor") is not None:
        return float(_number(rope, "attention_factor"))
    one, other = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(one) / scale(other) if one and other else scale(1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate x [..., rows, head_dim] by rows of a Rotary's tables, in the dtype of x."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos.to(x.dtype), swapped, signed_sin.to(x.dtype))
