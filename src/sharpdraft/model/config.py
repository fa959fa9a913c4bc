"""What a config.json of Llama's family says.

Read here, as importing transformers' classes for it takes longer than all the rest of loading a
small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_MOST = 2**24
"""Of anything that is counted: beyond it no table of it can be made."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_SCALED_TO_LENGTH = ("llama3", "yarn", "longrope")
# What says that pairs that turn together are neighbours, and what it says then.
_INTERLEAVED = {
    "is_neox_style": False,
    "interleaved": True,
    "rope_interleave": True,
    "rope_interleaved": True,
}


@dataclass(frozen=True)
class Config:
    """The configuration of a Llama, Qwen2 or Qwen3 model, or of a drafter with layers like theirs.

    Fields have the names of config.json. rope_parameters: "rope_type", "rope_theta" and what the
    type needs, whichever way the file has them. rotary_dim: how many dimensions of a head turn, the
    first ones. interleaved: whether neighbours turn together, and not dimensions half of rotary_dim
    apart; see `rotary.head_order`. dtype: the name of the dtype that it says the weights are in.
    source: the whole file.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope_parameters: Mapping[str, Any]
    rotary_dim: int
    interleaved: bool
    layer_types: tuple[str, ...]
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_id: int | list[int] | None
    dtype: str | None
    source: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, values: Mapping[str, Any], family: str | None = None) -> Config:
        """Read a mapping with the content of a config.json.

        family: one of ARCHITECTURES, whose defaults hold; None for the mapping's model_type.

        Raises ValueError that names the field: it is missing, or has no such value.
        """
        read = _Reader(values)
        family = family or str(values.get("model_type"))
        if family not in ARCHITECTURES:
            raise ValueError(f"model_type is {family}, none of {', '.join(ARCHITECTURES)}")
        hidden, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
        layers = read.whole("num_hidden_layers")
        positions = read.whole("max_position_embeddings", _POSITIONS[family])
        kv_heads = read.whole("num_key_value_heads", heads)
        head_dim = read.whole("head_dim", 128 if family == "qwen3" else hidden // heads)
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads is {heads}, no multiple of num_key_value_heads, {kv_heads}"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}: rotary positions need an even one")
        rope = _rope_parameters(read, positions)
        return cls(
            model_type=family,
            vocab_size=read.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.whole("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=positions,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            hidden_act=str(read.get("hidden_act", "silu")),
            rope_parameters=rope,
            rotary_dim=_rotary_dim(rope, head_dim),
            interleaved=_interleaved(values, rope),
            layer_types=_layer_types(read, layers),
            attention_bias=family == "qwen2" or read.flag("attention_bias"),
            mlp_bias=family == "llama" and read.flag("mlp_bias"),
            tie_word_embeddings=read.flag("tie_word_embeddings"),
            eos_token_id=read.tokens("eos_token_id", 2 if family == "llama" else None),
            dtype=_dtype(read),
            source=dict(values),
        )


@dataclass
class _Reader:
    """Values of a config.json; one that is null counts as missing."""

    values: Mapping[str, Any]

    def get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if value > _MOST:
            raise ValueError(f"{name} must be at most {_MOST}, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value

    def tokens(self, name: str, default: int | None) -> int | list[int] | None:
        value = self.values.get(name, default)
        every = value if isinstance(value, list) else [value]
        if value is not None and not all(type(each) is int for each in every):
            raise ValueError(f"{name} must be a token id or a list of them, got {value!r}")
        return value


def _rope_parameters(read: _Reader, positions: int) -> dict[str, Any]:
    """In the form of transformers 5, out of any that published files have: "rope_scaling" beside
    "rope_theta", "type" for "rope_type", the length of pretraining beside them."""
    each = [read.values.get(name) for name in ("rope_scaling", "rope_parameters")]
    said = [values for values in each if values]
    for values in said:
        if not isinstance(values, Mapping):
            raise ValueError(f"rope_parameters must be a mapping, got {values!r}")
    if len({_rope_said(values) for values in said}) > 1:
        raise ValueError("rope_scaling and rope_parameters contradict each other")
    given = said[0] if said else {}
    if nested := sorted(key for key, value in given.items() if isinstance(value, Mapping)):
        raise ValueError(
            f"rope_parameters has parameters for {' and '.join(nested)}: one set for all layers is "
            "supported"
        )
    found = dict(given)
    found["rope_type"] = str(found.get("rope_type") or found.get("type") or "default")
    found["rope_theta"] = _Reader(found).number("rope_theta", read.number("rope_theta", 10_000.0))
    if found.get("partial_rotary_factor") is None:
        found.pop("partial_rotary_factor", None)
        if (part := read.get("partial_rotary_factor", None)) is not None:
            found["partial_rotary_factor"] = part
    if found["rope_type"] in _SCALED_TO_LENGTH:
        length = "original_max_position_embeddings"
        found[length] = read.whole(length, _Reader(found).whole(length, positions))
    return found


def _rope_said(values: Mapping[str, Any]) -> str:
    """What one of two mappings for rotary positions says, without the base, which may stand beside
    them."""
    kind = values.get("rope_type") or values.get("type") or "default"
    rest = {k: v for k, v in values.items() if k not in ("rope_type", "type", "rope_theta")}
    return f"{kind} {sorted(rest.items())}"


def _rotary_dim(rope: Mapping[str, Any], head_dim: int) -> int:
    part = _Reader(rope).number("partial_rotary_factor", 1.0)
    found = int(head_dim * part)
    if not 2 <= found <= head_dim or found % 2:
        raise ValueError(
            f"partial_rotary_factor is {part}: it must leave an even number of the {head_dim} "
            "dimensions of a head to turn"
        )
    return found


def _interleaved(*given: Mapping[str, Any]) -> bool:
    said = {
        name: _Reader(values).flag(name) == meaning
        for values in given
        for name, meaning in _INTERLEAVED.items()
        if values.get(name) is not None
    }
    if len(set(said.values())) > 1:
        raise ValueError(f"{' and '.join(said)} contradict each other")
    return any(said.values())


def _layer_types(read: _Reader, layers: int) -> tuple[str, ...]:
    """What Qwen's two ways of saying "sliding window" come to."""
    full = layers
    if read.flag("use_sliding_window") and read.get("sliding_window", 4096):
        full = min(layers, int(read.number("max_window_layers", 28)))
    given = read.get("layer_types", None)
    if given is None:
        return ("full_attention",) * full + ("sliding_attention",) * (layers - full)
    if not isinstance(given, list) or len(given) != layers or not set(given) <= set(_LAYER_TYPES):
        raise ValueError(
            f"layer_types must name one of {_LAYER_TYPES} for each of {layers} layers "
            "(num_hidden_layers)"
        )
    return tuple(given)


def _dtype(read: _Reader) -> str | None:
    named = read.get("dtype", read.values.get("torch_dtype"))
    return None if named is None else str(named).removeprefix("torch.")
