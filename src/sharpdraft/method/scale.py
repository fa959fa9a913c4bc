"""The method: a policy turns counts of visible Keys into Query gains (arXiv 2610.05106).

A gain is `β - 1`, where `β` is the factor on a row's attention scores. A policy is a small frozen
object, and `scale_queries` applies its gains. No tensor value is read on the host.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

_QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@runtime_checkable
class Policy(Protocol):
    """Whatever turns counts of visible Keys into Query gains; equal ones always do so alike.

    An attribute `needs` may say that it needs more of its host than "keys", its counts: "scores",
    which no host shows yet.
    """

    def __hash__(self) -> int: ...

    def gain(self, keys: Tensor) -> Tensor:
        """Counts of visible Keys, any shape -> float32 gains `β - 1`, same shape and device."""
        ...


@runtime_checkable
class LayerPolicy(Protocol):
    """A policy for each of a drafter's layers; `needs` has "layer" then."""

    @property
    def needs(self) -> tuple[str, ...]: ...

    @property
    def layers(self) -> int | None:
        """How many layers it is for; None for any number."""
        ...

    def __hash__(self) -> int: ...

    def at(self, layer: int) -> Policy:
        """The policy of one layer, 0 being the first."""
        ...


Scale = Policy | LayerPolicy


def needs_of(scale: Scale | None) -> tuple[str, ...]:
    """What a policy needs of its host: "keys", "layer", "scores"; nothing for None."""
    return () if scale is None else tuple(getattr(scale, "needs", ("keys",)))


def policy_at(scale: Scale | None, layer: int) -> Policy | None:
    """The policy of one layer, which needs no other; None for None."""
    return scale.at(layer) if isinstance(scale, LayerPolicy) else scale


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

    Args:
        query: `[..., head_dim]`, float16, bfloat16 or float32.
        gain: float32 with exactly one dimension fewer than `query`, each size 1 or that of `query`:
            for Queries `[batch, heads, rows, head_dim]` and gains `[batch, rows]` pass
            `gain[:, None, :]`. Dimensions are never added on the left, since `[batch, rows]` would
            then pass for `[heads, rows]`.

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
            f"gain of shape {tuple(gain.shape)} does not fit query of shape {tuple(query.shape)}: "
            f"it needs one dimension fewer, each of size 1 or as in {tuple(rows)}; put a 1 where "
            "the gain does not vary, such as gain[:, None, :] for heads"
        )
    return query + (gain.unsqueeze(-1) * query.float()).to(query.dtype)
