"""Small training runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.train.dflash import Recipe
from sharpdraft.train.sessions import write_wave
from support.tiny import BLOCK, PROMPT, VOCAB, Tiny

RECIPE = Recipe(
    block=BLOCK,
    layers=2,
    taps=(0, 1, 3),
    start_layers=(1, 3),
    mask_token=3,
    steps=12,
    sequences=4,
    anchors=10,
    warmup=4,
    negatives=20,
)


def turns_for(target: CausalLM, count: int) -> list[list[list[int]]]:
    rng = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 7, (count, 3), generator=rng).tolist()
    return [
        [torch.randint(13, VOCAB, (n,), generator=rng).tolist() for n in row] for row in lengths
    ]


def end_of(tiny: Tiny) -> int:
    """What is taken for the end of a turn: a token that the target does write, but not all the
    time."""
    return Counter(tiny.text[PROMPT:]).most_common(2)[1][0]


def wave_of(tiny: Tiny, count: int = 4, length: int = 90, **options: Any) -> dict[str, Tensor]:
    return write_wave(tiny.target, turns_for(tiny.target, count), length, end_of(tiny), **options)
