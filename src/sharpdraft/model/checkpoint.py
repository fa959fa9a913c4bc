"""A causal LM's directory, read: config.json and weights.

Everything that can be wrong with one is a SharpDraftError, found before the weights are read where
the configuration shows it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError

from ..errors import SharpDraftError, note, one_line
from .causal_lm import CausalLM
from .config import ARCHITECTURES, Config
from .keys import CAUSAL_LM, Keys
from .rotary import frequencies, has_frequencies
from .tensors import FLOATING, Place, Reader, places_in

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_QUANTISED = ("quantization_config", "compression_config", "quantization")
_NORMED = Keys.of(qk_layernorm=(True,), qk_norm=(True,), use_qk_norm=(True,))
_NO_KEYS = Keys()
# Projections that are one product here, all of them with a bias or none.
_PRODUCTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def read_config(directory: Path, *, extra: Keys = _NO_KEYS, role: str = "target") -> Config:
    """The configuration in a causal LM's directory.

    extra: what is done with keys beside those of a causal LM. role: what the model is for, as
    messages call it.

    Raises SharpDraftError for a file that is missing or broken, and for what the configuration
    alone shows that CausalLM cannot run.
    """
    path = directory / "config.json"
    name = _called(directory, role)
    if not path.is_file():
        raise SharpDraftError(
            f"{name} holds no config.json: it is not a checkpoint in transformers' format"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        family = values.get("model_type")
        config = Config.of(values) if family in ARCHITECTURES else None
    except (OSError, ValueError) as error:
        raise SharpDraftError(
            f"{path} cannot be read as a model configuration: {one_line(error)}"
        ) from error
    if config is None:
        raise SharpDraftError(
            f"{name} is of architecture '{family}', which is not supported as {role}; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if any(values.get(key) for key in _QUANTISED):
        raise SharpDraftError(
            f"{name} holds quantised weights, which are not supported: use the full-precision model"
        )
    if "sliding_attention" in config.layer_types:
        raise SharpDraftError(
            f"{name} uses sliding-window attention, which is not supported in a {role}"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise SharpDraftError(
            f"{name} uses the activation '{config.hidden_act}'; only 'silu' is supported"
        )
    try:
        frequencies(config)
    except SharpDraftError as error:
        raise SharpDraftError(f"{name}: {error}") from error
    _keys(config, extra).refuse(values, _said(path, role))
    return config


def _keys(config: Config, extra: Keys) -> Keys:
    """What is done with the keys of a model's config.json."""
    return CAUSAL_LM | (_NORMED if config.model_type == "qwen3" else _NO_KEYS) | extra


def _called(directory: Path, role: str) -> str:
    return str(directory) if role == "target" else f"the {role} in {directory}"


def _said(path: Path, role: str) -> str:
    return str(path) if role == "target" else f"the {role}'s {path}"


def read_causal_lm(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    rounded: bool = False,
    extra: Keys = _NO_KEYS,
    role: str = "target",
) -> CausalLM:
    """Read a model, such as a target or a draft LM; memory for the weights is needed once.

    dtype: None for the checkpoint's own. weight_dtype: as in CausalLM. rounded: round matrices to
    bfloat16 first; another model, strictly. extra, role: as in read_config.

    Raises SharpDraftError for a directory that read_config refuses, and for weights that are
    incomplete, damaged or another model's; torch.OutOfMemoryError where the device has no room.
    Notes what config.json says that is not known, and biases that it does not speak of.
    """
    config = read_config(directory, extra=extra, role=role)
    _keys(config, extra).check(config.source, _said(directory / "config.json", role))
    try:
        with ExitStack() as opened:
            places = _named(places_in(directory, opened))
            if config.tie_word_embeddings and _HEAD in places:
                places.setdefault(_EMBEDDING, places[_HEAD])
            _check_tensors(config, places, _called(directory, role))
            reader = Reader(places, dtype or _own_dtype(config, places), device, rounded)
            if config.tie_word_embeddings and _HEAD in places:
                _drop_copy(places, reader)
            model = CausalLM(config, reader, weight_dtype=weight_dtype)
            model.directory = directory
            return model
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SharpDraftError(
            f"the weights in {directory} cannot be read ({one_line(error)}): "
            "they are incomplete or damaged; remove them, then copy or download them again"
        ) from error


def _named(places: dict[str, Place]) -> dict[str, Place]:
    """Tensors under the names of a causal LM; a model that was saved without its head lacks
    "model." in them."""
    if any(name.startswith("model.") for name in places):
        return places
    return {name if name == _HEAD else f"model.{name}": p for name, p in places.items()}


def tensor_shapes(config: Config, biased: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a whole checkpoint, which may lack the head where embeddings are tied.

    biased: projections with a bias that the configuration does not speak of, as "mlp.down_proj".
    """
    size, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    # What each projection takes and gives, and whether it has a bias.
    attn = config.attention_bias
    projections = {
        "self_attn.q_proj": (q, size, attn),
        "self_attn.k_proj": (kv, size, attn),
        "self_attn.v_proj": (kv, size, attn),
        "self_attn.o_proj": (size, q, attn and config.model_type != "qwen2"),
        "mlp.gate_proj": (inner, size, config.mlp_bias),
        "mlp.up_proj": (inner, size, config.mlp_bias),
        "mlp.down_proj": (size, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": size, "post_attention_layernorm": size}
    if config.model_type == "qwen3":
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, size)}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        for name, (outs, ins, bias) in projections.items():
            shapes[f"{at}.{name}.weight"] = (outs, ins)
            if bias or name in biased:
                shapes[f"{at}.{name}.bias"] = (outs,)
        shapes |= {f"{at}.{name}.weight": (width,) for name, width in norms.items()}
    shapes["model.norm.weight"] = (size,)
    shapes[_HEAD] = (config.vocab_size, size)
    return shapes


def _drop_copy(places: dict[str, Place], reader: Reader) -> None:
    """A head that is the embedding once more is not held twice. One that differs is the head,
    whatever the configuration says; transformers does the same."""
    head, embedding = reader(_HEAD), reader(_EMBEDDING)
    if head is not None and embedding is not None and torch.equal(head, embedding):
        del places[_HEAD]


def _check_tensors(config: Config, places: dict[str, Place], model: str) -> None:
    """Refuse weights that lack tensors, or have others than are used; those that say again what the
    configuration says go. model: as messages call it."""
    first = "model.layers.0"
    given = {
        name
        for product in _PRODUCTS
        if all(f"{first}.{each}.bias" in places for each in product)
        for name in product
    }
    shapes = tensor_shapes(config, given)
    if config.tie_word_embeddings and _HEAD not in places:
        del shapes[_HEAD]
    if missing := sorted(set(shapes) - set(places)):
        raise SharpDraftError(
            f"the weights of {model} lack {_some(missing)}: the checkpoint is incomplete; copy "
            "or download it again"
        )
    for name in [name for name in places if name.endswith("rotary_emb.inv_freq")]:
        _check_frequencies(config, places.pop(name), name, model)
    # Weights of another size, or that the architecture has no place for, are another model's. Left
    # out, they would change what it says without a word.
    strange = sorted(set(places) - set(shapes))
    strange += sorted(name for name, shape in shapes.items() if places[name].shape != shape)
    if strange:
        raise SharpDraftError(
            f"the weights of {model} do not belong to its config.json: see {_some(strange)}"
        )
    if odd := sorted(name for name in shapes if places[name].dtype not in FLOATING):
        raise SharpDraftError(
            f"{model} holds weights of dtype {places[odd[0]].dtype} ({_some(odd)}): use the "
            "full-precision model"
        )
    if unsaid := sorted(set(shapes) - set(tensor_shapes(config))):
        note(
            f"the weights of {model} have biases that its config.json does not speak of, and they "
            f"are used: {_some(unsaid)}"
        )


def _check_frequencies(config: Config, place: Place, name: str, model: str) -> None:
    """Refuse frequencies that are not those of the configuration."""
    if place.dtype in FLOATING and has_frequencies(config, place.read()):
        return
    raise SharpDraftError(
        f"the weights of {model} hold {name} with other rotary positions than its config.json "
        "says: correct rope_theta or rope_parameters there"
    )


def _own_dtype(config: Config, places: Mapping[str, Place]) -> torch.dtype:
    """The dtype that config.json names, or else the embedding's."""
    named = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATING.values()}
    return named.get(config.dtype or "", FLOATING[places[_EMBEDDING].dtype])


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
