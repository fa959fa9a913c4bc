"""The method: a policy turns counts of visible Keys into Query gains (SharpDraft, arXiv
2610.05106).

A gain is `β - 1`, where `β` is the factor on a row's attention scores. A policy is a small frozen
object read from `sharpdraft.json`; `scale_queries` applies its gains. No tensor value is read on
the host.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

_QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@runtime_checkable
class Policy(Protocol):
    """Whatever turns counts of visible Keys into Query gains; equal ones always do so alike."""

    def __hash__(self) -> int: ...

    def gain(self, keys: Tensor) -> Tensor:
        """Counts of visible Keys, any shape -> float32 gains `β - 1`, same shape and device."""
        ...


@dataclass(frozen=True)
class FixedSlope:
    """The deployed rule: `β(N) = min(β_max, 1 + log(r)/s)`, `r = max((N - k)/(N0 - k), 1)`; arXiv
    2610.05106.

    At and below `reference` Keys the gain is exactly zero; that includes rows with `top_k` Keys or
    fewer.

    Args: reference: N0, the Key count up to which the drafter is left as released, in Keys. slope:
        s, what the slope `F'(1)` of the log-contrast curve is taken to be; larger scales less.
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
        _require_integer("reference", self.reference)
        _require_integer("top_k", self.top_k)
        _require_positive("slope", self.slope)
        _require_positive("max_scale", self.max_scale)
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.reference <= self.top_k:
            raise ValueError(
                f"reference (N0) must be above top_k, got reference={self.reference}, top_k={self.top_k}: "
                "the competitor ratio (N - k)/(N0 - k) needs Keys outside the top group. Raise reference, "
                "usually to about the length the drafter was trained at, or lower top_k"
            )
        if self.max_scale < 1:
            raise ValueError(
                f"max_scale must be at least 1 (1 switches scaling off), got {self.max_scale}"
            )

    def with_reference(self, reference: int) -> "FixedSlope":
        """The same policy with another N0. Raises ValueError as the constructor does."""
        return replace(self, reference=reference)

    def gain(self, keys: Tensor) -> Tensor:
        """Gain `β(N) - 1` for each count.

        Args:
            keys: visible Keys N of each Query row, any shape, integer or floating.

        Returns:
            float32 of the shape and on the device of `keys`, in `[0, max_scale - 1]`.

        Raises:
            TypeError: `keys` is boolean or complex.
        """
        _require_counts(keys)
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
        _require_positive("scale", self.scale)

    def gain(self, keys: Tensor) -> Tensor:
        """Gain `scale - 1` everywhere: float32, shape and device of `keys`; errors as for
        FixedSlope."""
        _require_counts(keys)
        return torch.full_like(keys, self.scale - 1, dtype=torch.float32)


def as_gain(gain: Tensor) -> Tensor:
    """The gain itself. Raises TypeError where it is not float32, as a policy returns it."""
    if gain.dtype != torch.float32:
        raise TypeError(f"gain must be float32, as a policy returns it, got {gain.dtype}")
    return gain


def scale_queries(query: Tensor, gain: Tensor) -> Tensor:
    """Scale each Query row by `1 + gain`, in the arithmetic of arXiv 2610.05106.

    `gain * query` is computed in float32, cast to the dtype of `query` and added to `query`, so a
    zero gain is the identity to the bit on every finite value, signed zeros and subnormals
    included. An infinite Query element becomes NaN; its row's attention would have been NaN
    unscaled as well. A compiler that fuses the steps may skip the intermediate cast, which can move
    the result by one unit in the last place where the gain is not zero.

    Args: query: `[..., head_dim]`, float16, bfloat16 or float32. gain: float32 with exactly one
        dimension fewer than `query`, each size 1 or that of `query`: for Queries `[batch, heads,
        rows, head_dim]` and gains `[batch, rows]` pass `gain[:, None, :]`. Dimensions are never
        added on the left, since `[batch, rows]` would then pass for `[heads, rows]`.

    Returns:
        A new tensor of the shape and dtype of `query`.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: the shapes do not fit.
    """
    if query.dtype not in _QUERY_DTYPES:
        raise TypeError(f"query must be float16, bfloat16 or float32, got {query.dtype}")
    as_gain(gain)
    rows = query.shape[:-1]
    if query.dim() != gain.dim() + 1 or any(
        g not in (1, r) for g, r in zip(gain.shape, rows, strict=True)
    ):
        raise ValueError(
            f"gain of shape {tuple(gain.shape)} does not fit query of shape {tuple(query.shape)}: it needs "
            f"one dimension fewer, each of size 1 or as in {tuple(rows)}; put a 1 where the gain does not "
            "vary, such as gain[:, None, :] for heads"
        )
    return query + (gain.unsqueeze(-1) * query.float()).to(query.dtype)


_KINDS: Mapping[str, type[FixedSlope] | type[Constant]] = {
    "fixed_slope": FixedSlope,
    "constant": Constant,
}


def policy_to_settings(policy: Policy) -> dict[str, Any]:
    """The policy as it stands in `sharpdraft.json`: its fields and a "kind".

    Raises:
        ValueError: the policy is of a kind that the file does not know.
    """
    for kind, cls in _KINDS.items():
        if isinstance(policy, cls):
            return {"kind": kind, **asdict(policy)}
    raise ValueError(
        f"{policy!r} cannot be written as settings: known kinds are {', '.join(_KINDS)}"
    )


def policy_from_settings(settings: Mapping[str, Any]) -> Policy:
    """The policy that a mapping read from `sharpdraft.json` describes; fields with a default may be
    left out.

    Raises: ValueError: the kind is missing or unknown, a key is missing or unknown, or a value is
        wrong.
    """
    kind = settings.get("kind") if isinstance(settings, Mapping) else None
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(
            f'a policy is a mapping with "kind", one of {", ".join(_KINDS)}; got {settings!r}'
        )
    values = {key: value for key, value in settings.items() if key != "kind"}
    names = [field.name for field in fields(cls)]
    if unknown := sorted(str(key) for key in values if key not in names):
        raise ValueError(
            f"unknown {kind} settings {', '.join(unknown)}: known are {', '.join(names)}"
        )
    if names[0] not in values:
        raise ValueError(f'{kind} settings need "{names[0]}"')
    return cls(**values)


def _require_integer(name: str, value: object) -> None:
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, got {value!r}")


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")


def _require_counts(keys: Tensor) -> None:
    if keys.dtype == torch.bool or keys.is_complex():
        raise TypeError(
            f"keys must be counts of visible Keys, got {keys.dtype}: for a mask, pass mask_keys(mask)"
        )


REPORTED_SETTINGS: Mapping[str, FixedSlope] = MappingProxyType(
    {"dflash": FixedSlope(2048), "dflash-glm": FixedSlope(4096), "pard": FixedSlope(8192)}
)
"""Settings reported in arXiv 2610.05106; `dflash` is for the Qwen3-4B, Qwen3-8B and Llama-3.1-8B
drafters. EAGLE 3.1 has no entry, as its reference is not in our sources. Other drafters need their
own validation."""
