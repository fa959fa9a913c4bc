"""What a vLLM config asks of sharpdraft, and what vLLM can do of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ...errors import SharpDraftError
from ...method.settings import DraftSettings, Host, asked_settings

KEY = "sharpdraft"
ENVIRONMENT = "SHARPDRAFT"

VLLM = Host(
    "vLLM",
    provides={"keys", "layer", "window", "length"},
    lacks={
        "sinks": "vLLM's attention backends cannot keep the first Keys beside a window: leave "
        "sinks out",
        "scores": "vLLM's attention backends show no scores",
    },
)

_DRAFTS = "num_speculative_tokens"
# Those whose configuration is the drafter's own, so that its layers are those that draft.
_OWN_CONFIG = ("dflash", "draft_model", "eagle", "eagle3")


def asked_in(config: Any) -> object:
    """What a vLLM config or its arguments, or else the environment, ask of sharpdraft; None if
    nothing."""
    additional = config.additional_config
    asked = additional.get(KEY) if isinstance(additional, Mapping) else None
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
                f"{ENVIRONMENT} is neither JSON, nor 1, nor settings, nor a path: {error}"
            ) from error
    return None if asked is False else asked


def is_asked(config: Any) -> bool:
    """Whether a vLLM config asks for sharpdraft, be it only to measure."""
    return config.speculative_config is not None and asked_in(config) is not None


def settings_in(config: Any) -> DraftSettings | None:
    """The settings that a vLLM config asks for; None where it does not ask.

    Raises SharpDraftError for wrong settings, for what vLLM cannot do of them, and where they
    contradict the config.
    """
    asked = asked_in(config)
    if asked is None:
        return None
    speculative = config.speculative_config
    if speculative is None:
        raise SharpDraftError(
            "sharpdraft is asked for, but no drafter is: add --speculative-config, or take it out"
        )
    settings = asked_settings(asked, getattr(speculative, "model", None))
    drafts = getattr(speculative, _DRAFTS, None)
    settings.check(VLLM, layers=_layers(speculative), drafts=drafts)
    if None not in (drafts, settings.drafts) and drafts != settings.drafts:
        raise SharpDraftError(
            f"length (drafts@{settings.drafts}): the speculative config drafts {drafts} tokens "
            f"({_DRAFTS}): leave one of them out"
        )
    return settings


def fill_in(arguments: Any) -> None:
    """Have vLLM draft as many tokens as the settings say, where its own arguments name no number.

    arguments: `EngineArgs`. Raises SharpDraftError for wrong settings.
    """
    speculative = arguments.speculative_config or {}
    model = speculative.get("model") or getattr(arguments, "spec_model", None)
    named = {key.replace("-", "_") for key in speculative}
    counted = _DRAFTS in named or getattr(arguments, "spec_tokens", None) is not None
    if counted or not (speculative or model):
        return
    asked = asked_in(arguments)
    # Beside which weights vLLM itself finds out later.
    if asked is None or (asked is True and model is None):
        return
    if (drafts := asked_settings(asked, model).drafts) is not None:
        arguments.speculative_config = {**speculative, _DRAFTS: drafts}


def _layers(speculative: Any) -> int | None:
    """Attention layers that draft, where the config tells."""
    if speculative.method not in _OWN_CONFIG:
        return None
    return getattr(speculative.draft_model_config.hf_text_config, "num_hidden_layers", None)
