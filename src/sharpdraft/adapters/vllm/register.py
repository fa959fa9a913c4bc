"""The vLLM plugin: vLLM loads `register` in every process that it starts.

Nothing is done unless asked for, by `--additional-config '{"sharpdraft": ...}'` or the environment
variable SHARPDRAFT (see `settings.asked_settings`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

from ...errors import SharpDraftError
from ..hooks import when_imported, wrap_once
from . import stats
from .checks import DRAFTERS, describe, norm_warnings, version_warnings, warnings_for
from .layers import put_on, window_of
from .request import VLLM, fill_in, is_asked, settings_in

_LOG = logging.getLogger("vllm.sharpdraft")  # vLLM prints what is logged below its own name.


@cache
def register() -> None:
    """Entry point of `vllm.general_plugins`; may be called more than once in a process."""
    when_imported("vllm.engine.arg_utils", watch_config)
    for module, drafter in DRAFTERS:
        when_imported(module, partial(watch_drafter, name=drafter))
    stats.register(is_asked)


def watch_config(module: ModuleType) -> None:
    """Refuse wrong settings before any process is started or weight is read."""
    if not wrap_once(module, "EngineArgs.create_engine_config", _configured):
        _LOG.error(
            "sharpdraft: this vLLM has no EngineArgs.create_engine_config: wrong settings "
            "show when the drafter is loaded"
        )


def watch_drafter(module: ModuleType, name: str) -> None:
    """Run a drafter as asked once it is loaded. name: of a class that knows which attention layers
    its own model brought along."""
    if not wrap_once(module, f"{name}.load_model", _loaded):
        _LOG.error("sharpdraft: this vLLM has no %s.load_model; its drafters stay unscaled", name)


def _configured(
    create: Callable[..., Any], arguments: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        fill_in(arguments)
        config = create(*args, **kwargs)
        settings_in(config)
    except SharpDraftError as error:
        raise ValueError(str(error)) from error
    return config


def _loaded(
    load: Callable[..., Any], drafter: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    loaded = load(*args, **kwargs)
    try:
        start(drafter)
    except SharpDraftError as error:
        _LOG.error("sharpdraft: %s. The drafter stays as it is.", error)
    except Exception:
        # Whatever another version of vLLM does otherwise: it goes on serving, and the log says why
        # nothing is scaled.
        _LOG.exception("sharpdraft: this vLLM is not as relied on. The drafter stays as it is.")
    return loaded


def start(drafter: Any) -> None:
    """Run a loaded drafter's layers as its config asks, and say so."""
    config = drafter.vllm_config
    settings = settings_in(config)
    if settings is None:
        return
    if not settings.acts:
        _LOG.info(
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
    parallel, compilation = config.parallel_config, config.compilation_config
    ranks = max(
        parallel.decode_context_parallel_size,
        getattr(parallel, "prefill_context_parallel_size", 1),
    )
    mode = getattr(compilation, "cudagraph_mode", None)
    # They stand there in the order in which the model made them.
    layers = {name: at for name, at in compilation.static_forward_context.items() if name in names}
    settings.check(VLLM, layers=len(layers))
    refused = put_on(
        layers,
        settings,
        get_forward_context,
        context_parallel=ranks > 1,
        full_graphs=mode is not None and mode.has_full_cudagraphs(),
    )
    for name, reason in refused.items():
        _LOG.error("sharpdraft: %s stays as released: %s", name, reason)
    done = {name: layer for name, layer in layers.items() if name not in refused}
    for line in describe(settings, done) if done else ():
        _LOG.info("sharpdraft: %s", line)
    for warning in (
        *version_warnings(),
        *norm_warnings(config),
        *warnings_for(config, settings, [window_of(layer, settings) for layer in done.values()]),
    ):
        _LOG.warning("sharpdraft: %s", warning)
