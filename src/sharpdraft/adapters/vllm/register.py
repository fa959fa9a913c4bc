"""The vLLM plugin: a drafter's Queries are scaled where its attention layers hand them to the
backend.

vLLM loads `register` in every process it starts. Nothing is scaled unless asked for, by
`--additional-config '{"sharpdraft": ...}'` or the environment variable SHARPDRAFT (see
`settings.asked_policy`).

Each draft layer's `impl.forward` is wrapped on the instance. It is called from within vLLM's opaque
attention op, which torch.compile never looks into, with the Query after its norm and RoPE and with
the metadata that says which Keys each row sees; everything here is tensor arithmetic on those, so a
CUDA graph records it and replays it on the metadata's own buffers. No value is read on the host.
"""

from __future__ import annotations

import inspect
import json
import os
import weakref
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

from torch import Tensor

from ...errors import SharpDraftError
from ...method.scale import Policy, scale_queries
from ...method.settings import asked_policy
from ...method.visible import ragged_keys
from ..imports import when_imported
from . import stats as vllm_stats
from .checks import describe, norm_warnings, version_warnings, warnings_for

KEY = "sharpdraft"
ENVIRONMENT = "SHARPDRAFT"

_V1, _V2 = "vllm.v1.spec_decode.llm_base_proposer", "vllm.v1.worker.gpu.spec_decode.speculator"
# Their metadata has the rows and Keys of each request as `query_start_loc` and `seq_lens`.
_BACKENDS = {
    "CPU_ATTN",
    "FLASH_ATTN",
    "FLASH_ATTN_DIFFKV",
    "FLEX_ATTENTION",
    "ROCM_AITER_FA",
    "ROCM_AITER_UNIFIED_ATTN",
    "ROCM_ATTN",
    "TRITON_ATTN",
}
_FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata")


@cache
def register() -> None:
    """Entry point of `vllm.general_plugins`; may be called more than once in a process."""
    when_imported(
        "vllm.engine.arg_utils", lambda m: _wrap(m.EngineArgs, "create_engine_config", _validated)
    )
    # The V1 and the V2 runner's drafters: each knows which attention layers its own model brought
    # along.
    when_imported(_V1, lambda m: _scale_after_load(m, "SpecDecodeBaseProposer"))
    when_imported(_V2, lambda m: _scale_after_load(m, "DraftModelSpeculator"))
    vllm_stats.register(is_asked)


def asked_in(config: Any) -> object:
    """What a vLLM config, or else the environment, asks of sharpdraft; None if nothing."""
    additional = config.additional_config
    asked = additional.get(KEY) if isinstance(additional, dict) else None
    if asked is None:
        text = os.environ.get(ENVIRONMENT, "")
        try:
            asked = (
                json.loads(text)
                if text.startswith("{")
                else {"": None, "0": None, "1": True}.get(text, text)
            )
        except ValueError as error:
            raise SharpDraftError(
                f"{ENVIRONMENT} is neither JSON, nor 1, nor a path: {error}"
            ) from error
    return None if asked is False else asked


def is_asked(config: Any) -> bool:
    """Whether a vLLM config asks for sharpdraft, be it only to measure."""
    return config.speculative_config is not None and asked_in(config) is not None


def policy_in(config: Any) -> Policy | None:
    """The policy that a vLLM config asks for; None for none. Raises SharpDraftError for wrong
    settings."""
    asked = asked_in(config)
    if asked is None:
        return None
    speculative = config.speculative_config
    if speculative is None:
        raise SharpDraftError(
            "sharpdraft is asked for, but no drafter is: add --speculative-config, or take it out"
        )
    return asked_policy(asked, getattr(speculative, "model", None))


def scale_draft_layers(
    layers: dict[str, Any],
    policy: Policy,
    current_pass: Callable[[], object],
    *,
    context_parallel: bool = False,
) -> dict[str, str]:
    """Scale the Queries of a drafter's attention layers from now on.

    layers: vLLM attention layers by name. current_pass: what differs between two forward passes and
    stays within one, vLLM's forward context. context_parallel: whether a rank holds only some of a
    request's Keys.

    Returns why a layer was left as it is, by its name; the others are scaled.
    """
    refused = {}
    shared: dict[int | None, _Gains] = {}
    for name, layer in layers.items():
        reason = (
            "its ranks hold parts of the Keys (context parallelism)"
            if context_parallel
            else _obstacle(layer)
        )
        if reason:
            refused[name] = reason
        else:
            gains = shared.setdefault(
                layer.sliding_window, _Gains(policy, layer.sliding_window, current_pass)
            )
            _scale(layer, gains)
    return refused


def _obstacle(layer: Any) -> str | None:
    """Why a layer cannot be scaled."""
    kind = type(layer).__name__
    if kind != "Attention":
        return f"{kind} is no layer whose visible Keys are counted"
    backend = layer.attn_backend.get_name()
    if backend not in _BACKENDS:
        return f"backend {backend} does not say how many Keys a row sees; speculative-config takes attention_backend"
    names = tuple(inspect.signature(layer.impl.forward).parameters)[: len(_FORWARD)]
    if names != _FORWARD:
        return f"this vLLM's {backend} takes ({', '.join(names)}, ...) where ({', '.join(_FORWARD)}, ...) is relied on"
    if layer.use_direct_call:
        return "this platform compiles attention with the model, and Queries are scaled at run time"
    return None


class _Gains:
    """Query gains of one forward pass, computed for its first layer and used by the others with
    that window."""

    def __init__(
        self, policy: Policy, window: int | None, current_pass: Callable[[], object]
    ) -> None:
        self.policy, self.window, self.current_pass = policy, window, current_pass
        # Metadata may be updated in place from one draft step to the next, so that it does not tell
        # passes apart.
        self.computed_in: Callable[[], object] = lambda: None
        self.metadata: Callable[[], object] = lambda: None
        self.gain: Tensor | None = None

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
                _log().warning_once(
                    "sharpdraft: %s does not say what each row sees: left unscaled", type(metadata)
                )
                return None
            self.gain = self.policy.gain(
                ragged_keys(start, keys, rows, causal=causal, window=self.window)
            )
            self.computed_in, self.metadata = weakref.ref(now), weakref.ref(metadata)
        return self.gain


def _scale(layer: Any, gains: _Gains) -> None:
    forward, quantise = layer.impl.forward, layer.query_quant
    # The layer would quantise the Query before it is scaled; it is quantised behind that instead.
    layer.query_quant = None

    @wraps(forward)
    def scaled(
        of: Any,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        gain = None if metadata is None else gains.of(metadata, len(query))
        if gain is not None:
            query = scale_queries(query, gain[:, None])
        if quantise is not None:
            query = quantise(query.reshape(len(query), -1), of._q_scale)[0].view(query.shape)
        return forward(of, query, key, value, kv_cache, metadata, *args, **kwargs)

    layer.impl.forward = scaled


def missing_hooks() -> list[str]:
    """What this vLLM lacks of what the plugin relies on, in words."""
    from importlib import import_module

    missing = []
    for module, name in ((_V1, "SpecDecodeBaseProposer"), (_V2, "DraftModelSpeculator")):
        try:
            found = hasattr(getattr(import_module(module), name, None), "load_model")
        except ImportError:
            found = module == _V2  # The V2 runner needs Triton; where it is missing, V1 runs.
        if not found:
            missing.append(f"{module} has no {name}.load_model: its drafters stay unscaled")
    return missing


def _scale_after_load(module: ModuleType, name: str) -> None:
    cls = getattr(module, name, None)
    if cls is None or not hasattr(cls, "load_model"):
        _log().error("sharpdraft: this vLLM has no %s.load_model; its drafters stay unscaled", name)
    else:
        _wrap(cls, "load_model", _scaled_once_loaded)


def _scaled_once_loaded(drafter: Any, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    loaded = load(drafter, *args, **kwargs)
    try:
        _start(drafter)
    except SharpDraftError as error:
        _log().error("sharpdraft: %s. The drafter stays as it is.", error)
    except Exception:
        # Whatever another version of vLLM does otherwise: it goes on serving, and the log says why
        # nothing is scaled.
        _log().exception("sharpdraft: this vLLM is not as relied on. The drafter stays as it is.")
    return loaded


def _start(drafter: Any) -> None:
    """Scale a loaded drafter's layers as its config asks, and say so."""
    config = drafter.vllm_config
    policy = policy_in(config)
    if policy is None:
        if is_asked(config):
            _log().info(
                "sharpdraft: Frozen as asked; acceptance is counted by context length, nothing is "
                "scaled"
            )
        return
    from vllm.forward_context import get_forward_context

    names = getattr(
        drafter, "_draft_attn_layer_names", getattr(drafter, "draft_attn_layer_names", None)
    )
    if not names:
        raise SharpDraftError(
            f"{type(drafter).__name__} of this vLLM names no attention layers of its drafter"
        )
    parallel = config.parallel_config
    divided = (
        max(
            parallel.decode_context_parallel_size,
            getattr(parallel, "prefill_context_parallel_size", 1),
        )
        > 1
    )
    every = config.compilation_config.static_forward_context
    layers = {name: every[name] for name in sorted(names)}
    refused = scale_draft_layers(layers, policy, get_forward_context, context_parallel=divided)
    for name, reason in refused.items():
        _log().error("sharpdraft: %s stays unscaled: %s", name, reason)
    if done := [name for name in layers if name not in refused]:
        _log().info("sharpdraft: %s", describe(policy, done))
    windows = [layers[name].sliding_window for name in done]
    for warning in (
        *version_warnings(),
        *norm_warnings(config),
        *warnings_for(config, policy, windows),
    ):
        _log().warning("sharpdraft: %s", warning)


def _validated(arguments: Any, create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse wrong settings before any process is started or weight is read."""
    config = create(arguments, *args, **kwargs)
    try:
        policy_in(config)
    except SharpDraftError as error:
        raise ValueError(str(error)) from error
    return config


def _wrap(cls: type, name: str, around: Callable[..., Any]) -> None:
    """Make `around(self, original, ...)` the method `name`, once."""
    original = getattr(cls, name)
    if getattr(original, "_sharpdraft", False):
        return

    @wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, original, *args, **kwargs)

    wrapper._sharpdraft = True  # type: ignore[attr-defined]
    setattr(cls, name, wrapper)


def _log() -> Any:
    """vLLM prints what is logged below its own name, with the rank."""
    from vllm.logger import init_logger

    return init_logger("vllm.sharpdraft")
