"""Which family a drafter's checkpoint is of, by all that it shows: names in config.json, and what
its tensors are called."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SharpDraftError

FAMILIES = ("dflash", "eagle3", "pard")
MASK_KEYS = ("pard_token", "ptd_token_id")
"""What the mask token of a PARD is called."""
CALLED = {"dflash": "DFlash", "eagle3": "EAGLE-3", "pard": "PARD"}
_LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True)
class _Other:
    """A drafter that is not run: words in lower case that its names have in them, keys of its
    config.json, parts of its tensors' names."""

    name: str
    words: tuple[str, ...]
    keys: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


_OTHERS = (
    _Other("a DFlash 2", ("dflash2", "dflash_2"), ("selector_rank", "conv_kernel_size")),
    _Other("a DFlare", ("dflare",)),
    _Other("a DSpark", ("dspark",), ("markov_rank",), ("markov_head", "confidence_head")),
    _Other("a Domino", ("domino",), ("gru_hidden_dim",)),
    _Other("a PARD-2", ("pard2", "pard-2", "pard_2"), ("pard2",), ("target_proj",)),
    _Other("a P-EAGLE", ("peagle", "p-eagle", "p_eagle"), (), ("mask_hidden",)),
    _Other("an EAGLE-3 on other layers (Mamba, MLA)", ("eagle3mamba", "eagle3deepseek")),
    _Other("a Medusa", ("medusa",), ("medusa_num_heads",), ("medusa_head",)),
    _Other("a Hydra", ("hydra",), ("hydra_num_heads",)),
    _Other("an MLP speculator", ("mlpspec", "mlp_spec", "lstmspec"), (), ("speculator.",)),
    _Other("an MTP head", ("mtp", "nextn")),
    _Other("a tree drafter", ("tree",)),
)


def family_of(
    config: Mapping[str, Any], tensors: Collection[str] = (), asked: str | None = None
) -> str:
    """The family of a drafter, one of FAMILIES.

    config: its config.json; tensors: the names of its weights, which tell more. asked: what a user
    says it is.

    Raises SharpDraftError for a drafter that is none of them, by its own name where it has one;
    and where names and tensors are of different families and nobody says which it is.
    """
    if asked is not None:
        if asked not in FAMILIES:
            raise SharpDraftError(f"family {asked}: known are {', '.join(FAMILIES)}")
        return asked
    names = _names(config)
    _refuse_others(names, config, tensors)
    named, called = _named(names)
    built, parts = _built(tensors)
    marked = any(config.get(key) is not None for key in MASK_KEYS)
    if built == "pard" and not marked and named is None:
        raise SharpDraftError(
            f"the drafter is a plain language model ({parts}; config.json names "
            f"{_listed(names)}): a PARD drafter's config.json has a pard_token; give a DFlash, "
            "EAGLE-3 or PARD checkpoint as the drafter"
        )
    if named and built and named != built:
        raise SharpDraftError(
            f"the drafter's config.json is {CALLED[named]}'s ({called}), its weights are "
            f"{CALLED[built]}'s ({parts}): say with --family which it is ({', '.join(FAMILIES)})"
        )
    found = built or named or _by_keys(config)
    if found is None:
        raise SharpDraftError(
            f"the drafter holds {_listed(names)}, with nothing of a DFlash, EAGLE-3 or PARD "
            f"drafter in its config.json{' or its weights' if tensors else ''}: give one of "
            "these, or say with --family which it is"
        )
    return found


def unknown_name(config: Mapping[str, Any]) -> str | None:
    """A name in config.json that is neither a family's nor a language model's, if there is one."""
    names = [name for name in _names(config) if _named([name])[0] is None]
    return next((name for name in names if not name.endswith(_LANGUAGE_MODELS)), None)


def _names(config: Mapping[str, Any]) -> list[str]:
    """What config.json calls the model."""
    given = config.get("architectures")
    names = list(given) if isinstance(given, list | tuple) else [given]
    names.append(config.get("speculators_model_type"))
    return [name for name in names if isinstance(name, str)]


def _named(names: Collection[str]) -> tuple[str | None, str]:
    """The family that a name says, and the name."""
    for name in names:
        for family in ("dflash", "eagle3"):
            if family in name.lower():
                return family, name
    return None, ""


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "no named architecture"


def _refuse_others(
    names: Collection[str], config: Mapping[str, Any], tensors: Collection[str]
) -> None:
    nested = config.get("dflash_config")
    own = {**config, **nested} if isinstance(nested, Mapping) else config
    words = (own.get(key) for key in ("model_type", "spd_type", "projector_type"))
    for name in (*names, *(word for word in words if isinstance(word, str))):
        for other in _OTHERS:
            if any(word in name.lower() for word in other.words):
                raise _refusal(other.name, name)
        if "eagle" in name.lower() and "eagle3" not in name.lower():
            raise _refusal("an EAGLE-1 or EAGLE-2", name)
    for other in _OTHERS:
        for key in (key for key in other.keys if own.get(key)):
            raise _refusal(other.name, f"{key} in config.json")
        for tensor in tensors:
            if any(part in tensor for part in other.tensors):
                raise _refusal(other.name, f"the tensor {tensor}")


def _refusal(name: str, seen: str) -> SharpDraftError:
    return SharpDraftError(
        f"the drafter is {name} ({seen}), which is not supported: give a DFlash, EAGLE-3 (or 3.1) "
        "or PARD checkpoint"
    )


def _built(tensors: Collection[str]) -> tuple[str | None, str]:
    """The family that only it builds so, and by what it is told; None where tensors do not tell."""
    plain = {name.removeprefix("model.") for name in tensors}
    layer = any(name.startswith("layers.0.self_attn.") for name in plain)
    if "fc.weight" in plain:
        if "hidden_norm.weight" in plain:
            return "dflash", "fc.weight and hidden_norm.weight"
        own = ("midlayer.", "layers.0.hidden_norm.")
        if part := next((name for name in sorted(plain) if name.startswith(own)), None):
            return "eagle3", f"fc.weight and {part}"
        if layer:
            raise _refusal("an EAGLE-1 or EAGLE-2", "fc.weight, and layers without hidden_norm")
    elif layer and "embed_tokens.weight" in plain:
        return "pard", "embed_tokens.weight, layers and no fc.weight"
    return None, ""


def _by_keys(config: Mapping[str, Any]) -> str | None:
    """The family by keys that only its checkpoints have."""
    if "dflash_config" in config:
        return "dflash"
    if "eagle_config" in config or "eagle_aux_hidden_state_layer_ids" in config:
        return "eagle3"
    return "pard" if any(config.get(key) is not None for key in MASK_KEYS) else None
