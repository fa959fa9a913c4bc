"""What the config.json of a drafter says, whichever layout it has, and what is done with each of
its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from ..errors import SharpDraftError, note
from ..model.keys import CAUSAL_LM, Keys

_WHERE = "the drafter's config.json"

_DRAFTER = CAUSAL_LM | Keys.of(
    used="bias draft_vocab_size logit_scale qkv_bias speculators_config target_hidden_size "
    "transformer_layer_config",
    idle="base_model_ep_plan has_no_defaults_at_init modal_type pard_token speculators_model_type "
    "speculators_version target_model_type",
    compression_config=(),
    hidden_act=("silu",),
    quantization=(),
    quantization_config=(),
    sample_from_anchor=(False,),
    use_aux_hidden_state=(True,),
)

DFLASH = _DRAFTER | Keys.of(
    used="aux_hidden_state_layer_ids block_size causal dflash_config eagle_config "
    "eagle_aux_hidden_state_layer_ids input_embedding_scale is_causal mask_token_id "
    "num_target_layers output_multiplier sliding_window_non_causal swa_window_size "
    "target_layer_ids use_swa",
    idle="attention_backend has_embed_tokens has_lm_head loss_decay_gamma max_anchors num_anchors "
    "num_aux_layers train_embed_tokens",
    add_swa_attention_sink_bias=(False,),
    attention_sink_bias=(False,),
    dflash_query_causal=(False,),
    dspark_fixup_head_type=(),
    dspark_markov_rank=(),
)
"""Of a DFlash, those of its dflash_config, eagle_config and transformer_layer_config included."""

EAGLE3 = _DRAFTER | Keys.of(
    used="eagle_aux_hidden_state_layer_ids eagle_config fc_norm norm_before_fc "
    "norm_before_residual norm_output",
    idle="embed_requires_grad next_layer_regular num_aux_hidden_states truncated_vocab_size",
    parallel_draft_heads_num_layers=(0, 1),
    parallel_drafting=(False,),
    parallel_draft_step=(1,),
    use_input_layernorm_in_first_layer=(True,),
    use_last_layernorm=(True,),
    use_mtp_layernorm=(False,),
)
"""Of an EAGLE-3, those of its eagle_config and transformer_layer_config included."""

PARD = Keys.of(used="num_drafts pard_token ptd_token_id", idle="spd_type")
"""Beside those of a causal LM."""

# speculators writes of a layer's configuration what differs from the defaults of its class.
_DEFAULTS = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000},
    "qwen3": {
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
    },
}
_DEFAULT_LAYERS = {"num_attention_heads": 32, "num_hidden_layers": 32}


def merged(
    config: Mapping[str, Any], own: Sequence[str], keys: Keys, family: str
) -> dict[str, Any]:
    """All that a config.json says, in one mapping: on top of the layer's configuration, where that
    is nested (speculators), the file's own keys, and on top of these the mappings called `own`.

    keys: what is done with them. family: whose defaults a nested layer has that names no model
    type.

    Raises SharpDraftError for a key that is refused; notes those that are not known.
    """
    layer = _mapping(config, "transformer_layer_config")
    if layer:
        kind = str(layer.get("model_type", family))
        layer = {**_DEFAULT_LAYERS, **_DEFAULTS.get(kind, {}), **_given(layer)}
    found = {**layer, **_given(config)}
    for name in own:
        nested = _given(_mapping(config, name))
        for key in nested:
            if key in _SAID_ONCE and key in found and found[key] != nested[key]:
                raise SharpDraftError(
                    f"{_WHERE} says {key} twice: {found[key]} and, in {name}, {nested[key]}; "
                    "remove the wrong one"
                )
        found |= nested
    for said in (layer, config):
        if (model := said.get("model_type")) not in (None, *_LAYERS_LIKE_LLAMA):
            raise SharpDraftError(
                f"{_WHERE}: model_type is {model!r}, whose layers are of another kind than those "
                f"that are run; supported: {', '.join(_LAYERS_LIKE_LLAMA)}"
            )
    keys.check(found, _WHERE)
    return found


_LAYERS_LIKE_LLAMA = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_moe",
    "dflash",
    "eagle3",
    "speculator_model",
)
_SAID_ONCE = ("block_size", "mask_token_id", "target_layer_ids")


def _mapping(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise SharpDraftError(f"{_WHERE}: {name} is {found!r}, it must be an object")
    return dict(found or {})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not null, which stands for absent."""
    return {key: value for key, value in values.items() if value is not None}


def whole(values: Mapping[str, Any], name: str) -> int:
    """An integer. Raises SharpDraftError where it is none."""
    value = values.get(name)
    if type(value) is not int:
        raise SharpDraftError(f"{_WHERE} has no integer {name} ({value!r}), which it needs")
    return value


def count(values: Mapping[str, Any], name: str, most: int) -> int:
    """An integer of 1 to `most`. Raises SharpDraftError where it is none."""
    if not 1 <= (value := whole(values, name)) <= most:
        raise SharpDraftError(f"{_WHERE}: {name} is {value}, it must be 1 to {most}")
    return value


def flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false. Raises SharpDraftError where it is neither."""
    value = values.get(name, default)
    if not isinstance(value, bool):
        raise SharpDraftError(f"{_WHERE}: {name} must be true or false, got {value!r}")
    return value


def number(values: Mapping[str, Any], name: str, default: float) -> float:
    """A number. Raises SharpDraftError where it is none."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise SharpDraftError(f"{_WHERE}: {name} must be a number, got {value!r}")
    return float(value)


def layer_ids(value: object, name: str) -> tuple[int, ...]:
    """Ids of the target's layers. Raises SharpDraftError for what is no list of integers."""
    if not isinstance(value, list | tuple) or not value or any(type(i) is not int for i in value):
        raise SharpDraftError(f"{_WHERE}: {name} must be a list of layer ids, got {value!r}")
    return tuple(value)


def dflash_taps(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers of the target whose outputs a DFlash reads. Raises SharpDraftError where none are
    named, or two lists of them differ."""
    # EAGLE's ids name the layer that reads a state, which is the one behind that which wrote it.
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    for name in ("target_layer_ids", "aux_hidden_state_layer_ids"):
        if name in values:
            found[name] = (layer_ids(values[name], name),)
    if not found:
        raise SharpDraftError(
            f"{_WHERE} has no dflash_config.target_layer_ids: is it a DFlash checkpoint?"
        )
    (taps,) = next(iter(found.values()))
    if (name := "eagle_aux_hidden_state_layer_ids") in values:
        ids = layer_ids(values[name], name)
        found[name] = (ids, tuple(i - 1 for i in ids))
    for name, readings in found.items():
        if taps not in readings:
            raise SharpDraftError(
                f"{_WHERE} names other layers in {name} ({values[name]}) than in "
                f"{next(iter(found))} ({list(taps)}): remove the wrong one"
            )
    return taps


def eagle3_taps(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers of a target of so many whose outputs an EAGLE-3 reads. Raises SharpDraftError
    where two lists of them differ; notes what was assumed where there is none."""
    name = "eagle_aux_hidden_state_layer_ids"
    inner = _mapping(config, "eagle_config").get(name)
    outer = config.get(name)
    # Beside the other keys an id names the layer that reads the state (vLLM, speculators), within
    # eagle_config the one that wrote it (SpecForge, SGLang).
    wrote = None if inner is None else layer_ids(inner, f"eagle_config.{name}")
    if outer is None:
        if wrote is not None:
            return wrote
        ids: Iterable[int] = (2, layers // 2, layers - 3)
        taps = tuple(i - 1 for i in ids)
        note(
            f"{_WHERE} names no {name}: taken for the outputs of layers "
            f"{', '.join(map(str, taps))} (of 0 to {layers - 1}), which EAGLE-3 reads by default"
        )
        return taps
    read = layer_ids(outer, name)
    taps = tuple(i - 1 for i in read)
    if wrote is not None and wrote not in (taps, read):
        raise SharpDraftError(
            f"{_WHERE} says {name} twice: {outer} and, in eagle_config, {inner}; remove the wrong "
            "one"
        )
    return taps
