"""What rows see."""

from __future__ import annotations

import torch

from sharpdraft.method.visible import View


def check_count(kind: View, context: int, rows: int) -> None:
    mask = kind.mask(context, rows, torch.device("cpu"))
    sums = torch.full((rows,), context + rows) if mask is None else mask.sum(-1)
    assert kind.count(context, rows).tolist() == sums.tolist()
