"""The theory: how attention mass splits between the top k Keys and the rest (SharpDraft, arXiv
2610.05106).

For one row of scores z over N Keys, the k highest form the top group T and the others the rest R:

    top-k mass                      ρ(β) = Σ_T e^{βz} / Σ_all e^{βz} contrast
    F(β) = log mean_T e^{βz} - log mean_R e^{βz} its derivative                 F'(β) = E_T,β[z] -
    E_R,β[z], means under the softmax inside each group competitors for each top Key    C    = (N -
    k)/k exact partition identity  logit ρ(β) = F(β) - log C

Scores are `[..., N]`, natural-log units (after the 1/sqrt(head_dim) factor), floating; float16 and
bfloat16 are computed in float32, float32 and float64 as they are, in log space. A score of -inf is
a masked position and no Key: N is the number of the others. β is a positive number, or a tensor
that broadcasts with the leading dimensions, whose values are not checked. Results have the
broadcast leading shape.
"""

import math
from typing import TypeVar

import torch
from torch import Tensor

_Count = TypeVar("_Count", float, Tensor)


def top_mass(scores: Tensor, k: int, beta: float | Tensor = 1.0) -> Tensor:
    """Share ρ(β) of the attention mass that the k highest scores take (arXiv 2610.05106).

    Args:
        scores: `[..., N]`, floating.
        k: size of the top group, in Keys.
        beta: scale on the scores, a number or a tensor that broadcasts with `[...]`.

    Returns:
        `[...]` in [0, 1]: 1 for a row with k Keys or fewer, NaN for a row with none.

    Raises:
        TypeError: `scores` is not floating.
        ValueError: `scores` has no positions, `k < 1`, or the number `beta` is not positive and
            finite.
    """
    top, rest, scale = _split(scores, k, beta)
    return torch.sigmoid((scale * top).logsumexp(-1) - (scale * rest).logsumexp(-1))


def contrast(scores: Tensor, k: int, beta: float | Tensor = 1.0) -> Tensor:
    """Contrast F(β) between the top group and the rest, in nats (arXiv 2610.05106).

    Arguments, dtypes and errors as for `top_mass`, and a ValueError if `k >= N` leaves no rest.

    Returns:
        `[...]`, NaN for a row where masking leaves k Keys or fewer.
    """
    _require_rest(scores, k)
    top, rest, scale = _split(scores, k, beta)
    others = rest.isfinite().sum(-1).to(rest.dtype)
    return (scale * top).logsumexp(-1) - math.log(k) - (scale * rest).logsumexp(-1) + others.log()


def contrast_derivative(scores: Tensor, k: int, beta: float | Tensor = 1.0) -> Tensor:
    """Derivative F'(β) of the contrast, in nats per unit of scale (arXiv 2610.05106).

    Arguments, errors and NaN rows as for `contrast`.
    """
    _require_rest(scores, k)
    top, rest, scale = _split(scores, k, beta)
    return _softmax_mean(top, scale) - _softmax_mean(rest, scale)


def competitors(keys: _Count, k: int) -> _Count:
    """Competitors for each top Key, `C = (N - k)/k` (arXiv 2610.05106).

    Args:
        keys: N, a number or a tensor of counts (any shape; integers give float32).
        k: size of the top group, in Keys.

    Raises:
        ValueError: `k < 1`, or the number `keys` is below k; a tensor's values are not checked.
    """
    _require_group(k)
    if not isinstance(keys, Tensor) and keys < k:
        raise ValueError(f"a row of {keys} Keys has no top group of {k}")
    return (keys - k) / k


def attention_mass(query: Tensor, keys: Tensor, mask: Tensor | None, k: int = 32) -> Tensor:
    """Top-k attention mass of each Query row of one request.

    Args:
        query: `[1, heads, rows, head_dim]`, as attention takes it: rotated, scaled or not.
        keys: `[1, kv_heads, N, head_dim]`; a Key head serves `heads / kv_heads` Query heads.
        mask: bool `[rows, N]`, True where visible, or None where all are.
        k: size of the top group, in Keys.

    Returns:
        float32 `[heads, rows]`.
    """
    group = query.shape[1] // keys.shape[1]
    scores = query[0].float() @ keys[0].float().repeat_interleave(group, 0).transpose(1, 2)
    scores = scores / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return top_mass(scores, k)


def _split(scores: Tensor, k: int, beta: float | Tensor) -> tuple[Tensor, Tensor, float | Tensor]:
    """Top group `[..., min(k, N)]`, rest `[..., N]` with -inf in place of the top group, and β to
    apply."""
    if not scores.is_floating_point():
        raise TypeError(f"scores must be floating, got {scores.dtype}")
    if scores.dim() == 0 or scores.shape[-1] == 0:
        raise ValueError(
            f"scores must be [..., N] with at least one Key, got shape {tuple(scores.shape)}"
        )
    _require_group(k)
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    top, places = scores.topk(min(k, scores.shape[-1]), dim=-1)
    rest = scores.scatter(-1, places, -math.inf)
    if isinstance(beta, Tensor):
        return top, rest, beta.to(scores.dtype).unsqueeze(-1)
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be positive and finite, got {beta}")
    return top, rest, beta


def _softmax_mean(scores: Tensor, scale: float | Tensor) -> Tensor:
    # A masked score has weight 0, but 0 * -inf is NaN.
    return ((scale * scores).softmax(-1) * scores.masked_fill(scores == -math.inf, 0)).sum(-1)


def _require_group(k: int) -> None:
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")


def _require_rest(scores: Tensor, k: int) -> None:
    if scores.dim() and 0 < scores.shape[-1] <= k:
        raise ValueError(
            f"contrast compares the top k Keys with the rest, and k={k} of {scores.shape[-1]} Keys "
            "leaves none: pass more Keys or a smaller k"
        )
