"""What a drafter is trained by: chains of drafts, their loss against the target, and which of them
it would accept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Chains:
    """hidden, final [rows, hidden]: drafter's and target's last states where `valid`, in its order;
    labels int64 and valid bool [..., tokens of a chain]."""

    hidden: Tensor
    final: Tensor
    labels: Tensor
    valid: Tensor


def head_loss(
    hidden: Tensor,
    final: Tensor,
    labels: Tensor,
    weight: Tensor,
    head: Tensor,
    hard: float,
    chunk: int = 1024,
) -> tuple[float, Tensor, Tensor]:
    """Cross-entropy against `hard` of the chosen token and `1 - hard` of the target's distribution.

    hidden, final [rows, hidden]: drafter's and target's last states; labels [rows], weight [rows];
    head [vocab, hidden]. The gradient is written out (softmax minus aim), so that logits are never
    kept. Returns the weighted sum, its gradient for hidden, and the drafter's choice [rows].
    """
    total, gradient, choice = (
        0.0,
        torch.empty_like(hidden, dtype=torch.float32),
        torch.empty_like(labels),
    )
    with torch.no_grad():
        for part in torch.arange(len(hidden)).split(chunk):
            lo, hi = int(part[0]), int(part[-1]) + 1
            logits = (hidden[lo:hi].to(head.dtype) @ head.T).float()
            aim = (final[lo:hi].to(head.dtype) @ head.T).float().softmax(-1).mul_(1 - hard)
            rows = torch.arange(hi - lo, device=hidden.device)
            aim[rows, labels[lo:hi]] += hard
            choice[lo:hi] = logits.argmax(-1)
            log_norm = logits.logsumexp(-1)
            total += float((weight[lo:hi] * (log_norm - (aim * logits).sum(-1))).sum())
            error = logits.sub_(log_norm[:, None]).exp_().sub_(aim).mul_(weight[lo:hi, None])
            gradient[lo:hi] = (error.to(head.dtype) @ head).float()
    return total, gradient, choice


def accepted(valid: Tensor, hits: Tensor) -> Tensor:
    """Which tokens would be accepted, int64 [chains, tokens], of the chains whose whole length is
    the target's own.

    valid bool [..., tokens]; hits bool [valid ones]: whether the draft is the target's choice.
    """
    right = torch.zeros(valid.shape, dtype=torch.long)
    right[valid] = hits.long()
    return right[valid.all(-1)].cumprod(-1)
