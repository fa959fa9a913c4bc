"""Kinds of DFlash layers."""

from __future__ import annotations

from typing import Any

from sharpdraft.decode.session import Session
from sharpdraft.drafters.dflash import DFlash
from sharpdraft.model.cache import KVCache

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 24}
# Every kind of layer in the wild; the narrow non-causal window is the one that also cuts off Keys
# ahead.
LAYERS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"layer_types": [SLIDING, SLIDING], **WINDOW},
    "mixed": {"layer_types": [SLIDING, FULL], **WINDOW},
    "sliding, not causal": {"layer_types": [SLIDING, SLIDING], **WINDOW, "is_causal": False},
    "narrow, not causal": {
        "layer_types": [FULL, SLIDING],
        **WINDOW,
        "sliding_window": 4,
        "is_causal": False,
    },
    "causal": {"is_causal": True},
    "sliding from a layer on": {**WINDOW, "max_window_layers": 1},
}


def read(drafter: DFlash, text: list[int]) -> KVCache:
    """The drafter's cache behind a text."""
    session = Session(drafter.target, drafter)
    session.read(text)
    return session.drafts
