"""SharpDraft: speculative decoding that stays fast when generations get long (arXiv 2610.05106).

The method needs torch alone and is imported at once; what runs models is imported when it is first
asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .adapters.attach import Attached, attach
from .errors import SharpDraftError
from .method.scale import Constant, FixedSlope, Policy, scale_queries
from .method.theory import contrast, contrast_derivative, top_mass
from .method.visible import block_keys, causal_keys, mask_keys, ragged_keys

if TYPE_CHECKING:
    from .decode.batch import Batch, Request
    from .decode.rounds import Round
    from .decode.sampling import Sampling
    from .decode.session import Session
    from .drafters import load_drafter
    from .drafters.dflash import DFlash
    from .hub.models import load_target
    from .model.causal_lm import CausalLM

__all__ = [
    "Attached",
    "Batch",
    "CausalLM",
    "Constant",
    "DFlash",
    "FixedSlope",
    "Policy",
    "Request",
    "Round",
    "Sampling",
    "Session",
    "SharpDraftError",
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
    "Session": "decode.session",
    "CausalLM": "model.causal_lm",
    "load_drafter": "drafters",
    "load_target": "hub.models",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'sharpdraft' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f".{_LATER[name]}", __name__), name)
