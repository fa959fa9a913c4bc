"""SharpDraft: speculative decoding that stays fast when generations get long (arXiv 2610.05106).

The method needs torch alone and is imported at once; what runs models is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .attach import Attached, attach
from .cardinality import block_keys, causal_keys, mask_keys, ragged_keys
from .errors import SharpDraftError
from .mass import contrast, contrast_derivative, top_mass
from .scale import Constant, FixedSlope, Policy, scale_queries

if TYPE_CHECKING:
    from .decode.batch import Batch, Request
    from .decode.loop import Session
    from .decode.rounds import Round
    from .decode.sampling import Sampling
    from .drafters import load_drafter
    from .drafters.dflash import DFlash
    from .models import load_target
    from .target import Target

__all__ = [
    "Attached",
    "Batch",
    "Constant",
    "DFlash",
    "FixedSlope",
    "Policy",
    "Request",
    "Round",
    "Sampling",
    "Session",
    "SharpDraftError",
    "Target",
    "attach",
    "block_keys",
    "causal_keys",
    "contrast",
    "contrast_derivative",
    "load_drafter",
    "load_target",
    "mask_keys",
    "ragged_keys",
    "scale_queries",
    "top_mass",
]

_LATER = {
    "Batch": "decode.batch",
    "DFlash": "drafters.dflash",
    "Request": "decode.batch",
    "Round": "decode.rounds",
    "Sampling": "decode.sampling",
    "Session": "decode.loop",
    "Target": "target",
    "load_drafter": "drafters",
    "load_target": "models",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'sharpdraft' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f".{_LATER[name]}", __name__), name)
