"""A drafter's attention layers in vLLM: their windows, and the gains of their Queries.

Each layer's `impl.forward` is wrapped on the instance. It is called from within vLLM's opaque
attention op, which torch.compile never looks into, with the Query after its norm and RoPE and with
the metadata that says which Keys each row sees; everything here is tensor arithmetic on those, so a
CUDA graph records it and replays it on the metadata's own buffers. No value is read on the host.

A window is put on `impl` alone, whose kernel reads no Key beyond it; the layer still asks for a
cache that keeps every Key, so that vLLM shares and frees blocks as without. It has to be there
before metadata builders are made, which look at it.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import wrapt
from torch import Tensor

from ...method.scale import Policy, policy_at, scale_queries
from ...method.settings import DraftSettings
from ...method.visible import View, ragged_keys

_LOG = logging.getLogger("vllm.sharpdraft")  # vLLM prints what is logged below its own name.
# Their metadata has the rows and Keys of each request as `query_start_loc` and `seq_lens`.
_COUNTED = {
    "CPU_ATTN",
    "FLASH_ATTN",
    "FLASH_ATTN_DIFFKV",
    "FLEX_ATTENTION",
    "ROCM_AITER_FA",
    "ROCM_AITER_UNIFIED_ATTN",
    "ROCM_ATTN",
    "TRITON_ATTN",
}


def _span(window: int | None) -> tuple[int, int]:
    """A window as flash attention has it: Keys behind and ahead of a row."""
    return (-1, -1) if window is None else (window - 1, 0)


# How `impl.sliding_window` says it. Where rows are not causal, these look as far ahead as behind.
_WINDOWS: dict[str, Callable[[int | None], object]] = {
    "CPU_ATTN": lambda window: -1 if window is None else window,
    "FLASH_ATTN": _span,
    "FLEX_ATTENTION": lambda window: window,
    "TRITON_ATTN": _span,
}
_FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata")


def put_on(
    layers: Mapping[str, Any],
    settings: DraftSettings,
    current_pass: Callable[[], object],
    *,
    context_parallel: bool = False,
    full_graphs: bool = False,
) -> dict[str, str]:
    """Run a drafter's attention layers with settings from now on.

    layers: vLLM attention layers by name, first layer first. current_pass: what differs between two
    forward passes and stays within one, vLLM's forward context. context_parallel: whether a rank
    holds only some of a request's Keys. full_graphs: whether CUDA graphs hold attention, too.

    Returns why a layer was left as it is, by its name; the others are run as asked.
    """
    refused = {}
    shared: dict[tuple[Policy, int | None], _Gains] = {}
    for number, (name, layer) in enumerate(layers.items()):
        window = window_of(layer, settings)
        if context_parallel:
            reason: str | None = "its ranks hold parts of the Keys (context parallelism)"
        else:
            reason = _obstacle(layer) or _window_obstacle(layer, window, full_graphs)
        if reason:
            refused[name] = reason
            continue
        if window != layer.sliding_window:
            layer.impl.sliding_window = _WINDOWS[layer.attn_backend.get_name()](window)
        if (policy := policy_at(settings.scale, number)) is not None:
            gains = shared.setdefault((policy, window), _Gains(policy, window, current_pass))
            _scale(layer, gains)
    return refused


def window_of(layer: Any, settings: DraftSettings) -> int | None:
    """The window that settings leave a layer, in Keys; None for none."""
    own = View(window=getattr(layer, "sliding_window", None))
    return settings.views([own])[0].window


def _obstacle(layer: Any) -> str | None:
    """Why nothing can be put on a layer."""
    kind = type(layer).__name__
    if kind != "Attention":
        return f"{kind} is no layer whose visible Keys are counted"
    backend = layer.attn_backend.get_name()
    if backend not in _COUNTED:
        return (
            f"backend {backend} does not say how many Keys a row sees; speculative-config takes "
            "attention_backend"
        )
    names = tuple(inspect.signature(layer.impl.forward).parameters)[: len(_FORWARD)]
    if names != _FORWARD:
        return (
            f"this vLLM's {backend} takes ({', '.join(names)}, ...) where "
            f"({', '.join(_FORWARD)}, ...) is relied on"
        )
    if layer.use_direct_call:
        return "this platform compiles attention with the model, and Queries are scaled at run time"
    return None


def _window_obstacle(layer: Any, window: int | None, full_graphs: bool) -> str | None:
    """Why a layer cannot have that window."""
    if window == layer.sliding_window:
        return None
    backend = layer.attn_backend.get_name()
    if backend not in _WINDOWS:
        return (
            f"backend {backend} is not known to hide what is outside of a window; "
            f"speculative-config takes attention_backend, one of {', '.join(_WINDOWS)}"
        )
    if getattr(layer.impl, "sliding_window", ...) != _WINDOWS[backend](layer.sliding_window):
        return f"this vLLM's {backend} keeps its window otherwise than relied on"
    if full_graphs and backend == "FLEX_ATTENTION":
        return (
            f"{backend} makes its mask before it asks for the window where CUDA graphs hold "
            "attention, too: set cudagraph_mode to PIECEWISE"
        )
    return None


class _Gains:
    """Query gains of one forward pass, computed for its first layer and used by the others with
    that policy and window."""

    def __init__(
        self, policy: Policy, window: int | None, current_pass: Callable[[], object]
    ) -> None:
        self.policy, self.window, self.current_pass = policy, window, current_pass
        # Metadata may be updated in place from one draft step to the next, so that it does not tell
        # passes apart.
        self.computed_in: Callable[[], object] = lambda: None
        self.metadata: Callable[[], object] = lambda: None
        self.gain: Tensor | None = None
        self.warned = False

    def of(self, metadata: Any, rows: int) -> Tensor | None:
        """float32 [rows]; None for metadata that does not tell what each row sees."""
        now = self.current_pass()
        if (
            self.gain is None
            or self.computed_in() is not now
            or self.metadata() is not metadata
            or len(self.gain) != rows
        ):
            start, keys = (
                getattr(metadata, name, None) for name in ("query_start_loc", "seq_lens")
            )
            causal = getattr(metadata, "causal", True)
            if start is None or keys is None or not isinstance(causal, bool):
                if not self.warned:
                    _LOG.warning(
                        "sharpdraft: %s does not say what each row sees: left unscaled",
                        type(metadata),
                    )
                self.warned = True
                return None
            self.gain = self.policy.gain(
                ragged_keys(start, keys, rows, causal=causal, window=self.window)
            )
            self.computed_in, self.metadata = weakref.ref(now), weakref.ref(metadata)
        return self.gain


def _scale(layer: Any, gains: _Gains) -> None:
    # The layer would quantise the Query before it is scaled; it is quantised behind that instead.
    quantise, layer.query_quant = layer.query_quant, None

    def scaled(
        forward: Callable[..., Any], impl: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        of, query, key, value, kv_cache, metadata, *rest = args
        gain = None if metadata is None else gains.of(metadata, len(query))
        if gain is not None:
            query = scale_queries(query, gain[:, None])
        if quantise is not None:
            query = quantise(query.reshape(len(query), -1), of._q_scale)[0].view(query.shape)
        return forward(of, query, key, value, kv_cache, metadata, *rest, **kwargs)

    layer.impl.forward = wrapt.FunctionWrapper(layer.impl.forward, scaled)
