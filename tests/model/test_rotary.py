"""Rotary tables against transformers'."""

from __future__ import annotations

import torch

from sharpdraft.model.attention import Rotary, rotate
from support.tiny import Tiny


def test_rotary_is_transformers(tiny: Tiny) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    module = tiny.model.model.rotary_emb
    rotary = Rotary(module, 50)
    x = torch.randn(2, 3, 7, 8)
    for start in (0, 1, 43):
        cos, sin = module(x, torch.arange(start, start + 7)[None])
        expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
        found = rotate(x, rotary.cos[start : start + 7], rotary.sin[start : start + 7])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
