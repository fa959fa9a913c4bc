"""What is said of a vLLM config before it serves: what is scaled, and what silently costs
acceptance at length."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from ...errors import SharpDraftError
from ...method import registry
from ...method.settings import DraftSettings
from ...method.visible import View
from .request import is_asked, settings_in

TESTED = ("0.32",)
"""Versions of vLLM that the tests were run against; others with the same hooks run with a
warning."""


_V2 = "vllm.v1.worker.gpu.spec_decode.speculator"
DRAFTERS = (
    ("vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer"),
    (_V2, "DraftModelSpeculator"),
)
"""The drafters of the V1 and of the V2 runner: module and class."""


def describe(settings: DraftSettings, layers: Iterable[str]) -> list[str]:
    """What is done to draft layers, one line for each part of the settings."""
    names = list(layers)
    lines = []
    if settings.scale is not None:
        lines.append(
            f"Queries of {len(names)} draft layers are scaled by the Keys they see "
            f"({registry.describe(settings.scale)}): {', '.join(names)}"
        )
    if settings.view is not None:
        lines.append(
            f"In {len(names)} draft layers {registry.describe(settings.view)}: {', '.join(names)}"
        )
    return lines


def missing_hooks() -> list[str]:
    """What this vLLM lacks of what the plugin relies on, in words."""
    missing = []
    for module, name in DRAFTERS:
        try:
            found = hasattr(getattr(import_module(module), name, None), "load_model")
        except ImportError:
            found = module == _V2  # The V2 runner needs Triton; where it is missing, V1 runs.
        if not found:
            missing.append(f"{module} has no {name}.load_model: its drafters stay unscaled")
    return missing


def warnings_for(config: Any, settings: DraftSettings, windows: Iterable[int | None]) -> list[str]:
    """What silently costs acceptance at length, or keeps scaling from acting, in a vLLM config.

    windows: what is left of each draft layer, None for full attention.
    """
    found = []
    served, speculative = config.model_config.max_model_len, config.speculative_config
    draft = speculative.draft_model_config
    if draft.max_model_len < served:
        found.append(
            f"the drafter's maximum length is {draft.max_model_len} and {served} are served: "
            "beyond it vLLM drafts nothing, or takes positions the drafter has no RoPE for; serve "
            "less, or raise its max_position_embeddings"
        )
    rope, own = (_rope(c.hf_text_config) for c in (config.model_config, draft))
    if rope != "default" and own == "default":
        found.append(
            f"the target's RoPE is of type {rope} and the drafter's is not: their positions part "
            "ways where the target's are stretched; check the drafter's rope_parameters"
        )
    reference = getattr(settings.scale, "reference", None)
    if reference is not None:
        short = sorted({w for w in windows if w is not None and w <= reference})
        if short:
            found.append(
                f"a window of {short[0]} Keys never exceeds N0 = {reference}: scaling never acts "
                "there"
            )
        if served <= reference:
            found.append(f"{served} tokens are served and N0 is {reference}: scaling never acts")
    if speculative.method in ("dflash", "dspark") and config.kv_transfer_config is not None:
        found.append(
            "a KV connector restores the target's Keys but not the drafter's, which are made from "
            "hidden states (vLLM issue 47930): acceptance collapses on restored prefixes"
        )
    return found


def _rope(hf_config: Any) -> str:
    return str((getattr(hf_config, "rope_parameters", None) or {}).get("rope_type", "default"))


def version_warnings() -> list[str]:
    """Says so where the vLLM installed is not one that was tested."""
    import vllm

    if vllm.__version__.startswith(TESTED):
        return []
    return [
        f"vLLM {vllm.__version__} has the hooks relied on, but was not tested; tested: "
        f"{', '.join(TESTED)}"
    ]


def norm_warnings(config: Any) -> list[str]:
    """Says so where this vLLM's RMS norm takes one weight for all of a DFlash drafter's layers, as
    on CPU in 0.32."""
    import torch
    from vllm import _custom_ops as ops

    if config.speculative_config.method != "dflash" or config.device_config.device_type != "cpu":
        return []
    keys, weights = torch.ones(2, 1, 1, 32), torch.stack((torch.ones(32), 2 * torch.ones(32)))
    normed = torch.empty_like(keys)
    ops.rms_norm(normed, keys, weights, 1e-6)
    if torch.allclose(normed[1], 2 * normed[0]):
        return []
    return [
        "this vLLM norms the context Keys of every DFlash layer with the first layer's weights: a "
        "drafter of several layers accepts less here than it should; output is not affected"
    ]


def windows_of(hf_config: Any) -> list[int | None]:
    """Sliding window of each layer that a drafter's configuration names, None for full
    attention."""
    dflash = getattr(hf_config, "dflash_config", None) or {}
    count, types = hf_config.num_hidden_layers, getattr(hf_config, "layer_types", None)
    window = dflash.get("swa_window_size", getattr(hf_config, "sliding_window", None))
    if types is None or (dflash.get("use_swa") and "sliding_attention" not in types):
        return [window if dflash.get("use_swa") else None] * count
    return [window if kind == "sliding_attention" else None for kind in types[:count]]


def doctor(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What the plugin would do in `vllm serve` with these arguments, and its warnings; no weight is
    read.

    Raises SharpDraftError where vLLM is missing or refuses the arguments, or where sharpdraft's
    settings are wrong.
    """
    # vLLM logs to stdout, where the result belongs.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise SharpDraftError(
            f"vLLM cannot be imported here ({error}): run doctor where vLLM is installed"
        ) from error

    given = list(arguments)
    if given and not given[0].startswith("-"):
        given.insert(0, "--model")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    try:
        config = EngineArgs.from_cli_args(parser.parse_args(given)).create_engine_config()
    except (ValueError, OSError) as error:
        if isinstance(error.__cause__, SharpDraftError):
            raise error.__cause__ from None
        raise SharpDraftError(
            f"vLLM refuses these arguments: {' '.join(str(error).split())}"
        ) from error
    facts = [f"vLLM {vllm.__version__}, tested: {', '.join(TESTED)}"]
    speculative = config.speculative_config
    if speculative is None:
        return [*facts, "no --speculative-config: there is no drafter to scale"], []
    draft = speculative.draft_model_config
    facts.append(
        f"drafter {speculative.model} ({speculative.method}), {speculative.num_speculative_tokens} "
        f"drafts a round, up to {draft.max_model_len} tokens; {config.model_config.max_model_len} "
        "are served"
    )
    warnings = [*version_warnings(), *missing_hooks()]
    settings = settings_in(config)
    own = [View(window=window) for window in windows_of(draft.hf_text_config)]
    if settings is not None and settings.length is not None:
        facts.append(f"as the settings say, {registry.describe(settings.length)}")
    if settings is not None and settings.acts:
        facts += describe(settings, [f"layer {i}" for i in range(len(own))])
        windows = [view.window for view in settings.views(own)]
        warnings += warnings_for(config, settings, windows)
    elif is_asked(config):
        facts.append("asked for Frozen: acceptance is counted by context length, nothing is scaled")
    else:
        facts.append("sharpdraft is not asked for: nothing is scaled or counted")
    return facts, warnings
