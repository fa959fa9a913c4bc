"""SharpDraft: speculative decoding that stays fast when generations get long (arXiv 2610.05106).

Names are imported when they are first used: the method needs torch alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters.attach import Attached, attach
    from .decode.batch import Batch, Request
    from .decode.rounds import Round
    from .decode.sampling import Sampling
    from .decode.session import Arm, Session
    from .drafters.lookup import Lookup
    from .drafters.mixed import Mixed
    from .drafters.registry import load_drafter
    from .errors import SharpDraftError
    from .hub.targets import load_target
    from .method.policies import Constant, FixedSlope, LayerSlopes
    from .method.registry import register
    from .method.scale import Policy, scale_queries
    from .method.settings import DraftSettings, Window, read_settings, write_settings
    from .method.theory import contrast, contrast_derivative, top_mass
    from .method.visible import View, block_keys, causal_keys, mask_keys, ragged_keys
    from .model.causal_lm import CausalLM

_WHERE = {
    "adapters.attach": ("Attached", "attach"),
    "decode.batch": ("Batch", "Request"),
    "decode.rounds": ("Round",),
    "decode.sampling": ("Sampling",),
    "decode.session": ("Arm", "Session"),
    "drafters.lookup": ("Lookup",),
    "drafters.mixed": ("Mixed",),
    "drafters.registry": ("load_drafter",),
    "errors": ("SharpDraftError",),
    "hub.targets": ("load_target",),
    "method.policies": ("Constant", "FixedSlope", "LayerSlopes"),
    "method.registry": ("register",),
    "method.scale": ("Policy", "scale_queries"),
    "method.settings": ("DraftSettings", "Window", "read_settings", "write_settings"),
    "method.theory": ("contrast", "contrast_derivative", "top_mass"),
    "method.visible": ("View", "block_keys", "causal_keys", "mask_keys", "ragged_keys"),
    "model.causal_lm": ("CausalLM",),
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Arm",
    "Attached",
    "Batch",
    "CausalLM",
    "Constant",
    "DraftSettings",
    "FixedSlope",
    "LayerSlopes",
    "Lookup",
    "Mixed",
    "Policy",
    "Request",
    "Round",
    "Sampling",
    "Session",
    "SharpDraftError",
    "View",
    "Window",
    "attach",
    "block_keys",
    "causal_keys",
    "contrast",
    "contrast_derivative",
    "load_drafter",
    "load_target",
    "mask_keys",
    "ragged_keys",
    "read_settings",
    "register",
    "scale_queries",
    "top_mass",
    "write_settings",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'sharpdraft' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f".{_MODULE[name]}", __name__), name)
