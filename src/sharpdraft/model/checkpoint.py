"""A causal LM's directory, read: config.json and safetensors.

Everything that can be wrong with one is a SharpDraftError, found before the weights are read where
the configuration shows it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import SharpDraftError, one_line
from .causal_lm import CausalLM
from .config import ARCHITECTURES, Config
from .rotary import frequencies

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FLOATING = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def read_config(directory: Path) -> Config:
    """The configuration in a causal LM's directory.

    Raises SharpDraftError for a file that is missing or broken, and for what the configuration
    alone shows that CausalLM cannot run.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise SharpDraftError(
            f"{directory} holds no config.json: it is not a checkpoint in transformers' format"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
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
            f"{directory} is of architecture '{family}', which is not supported as target; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if values.get("quantization_config"):
        raise SharpDraftError(
            f"{directory} holds quantised weights, which are not supported: use the full-precision "
            "model"
        )
    if "sliding_attention" in config.layer_types:
        raise SharpDraftError(
            f"{directory} uses sliding-window attention, which is not supported in a target"
        )
    if strange := sorted(set(config.layer_types) - {"full_attention"}):
        raise SharpDraftError(
            f"{directory} has layers of type '{strange[0]}'; only 'full_attention' is supported"
        )
    if config.hidden_act != "silu":
        raise SharpDraftError(
            f"{directory} uses the activation '{config.hidden_act}'; only 'silu' is supported"
        )
    try:
        frequencies(config)
    except SharpDraftError as error:
        raise SharpDraftError(f"{directory}: {error}") from error
    return config


def read_causal_lm(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    rounded: bool = False,
) -> CausalLM:
    """Read a model, such as a target or a draft LM; memory for the weights is needed once.

    dtype: None for the checkpoint's own. weight_dtype: as in CausalLM. rounded: round matrices to
    bfloat16 first; another model, strictly.

    Raises SharpDraftError for a directory that read_config refuses, and for weights that are
    incomplete, damaged or another model's; torch.OutOfMemoryError where the device has no room.
    """
    config = read_config(directory)
    if not any(directory.glob("*.safetensors")):
        raise SharpDraftError(
            f"{directory} holds no *.safetensors weights: convert the model, or finish its download"
        )
    try:
        with ExitStack() as opened:
            places = _places(directory, opened)
            if config.tie_word_embeddings and _HEAD in places:
                places.setdefault(_EMBEDDING, places[_HEAD])
            _check_tensors(config, places, directory)
            reader = _Reader(places, dtype or _own_dtype(config, places), device, rounded)
            if config.tie_word_embeddings and _HEAD in places:
                _drop_copy(places, reader)
            return CausalLM(config, reader, weight_dtype=weight_dtype)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SharpDraftError(
            f"the weights in {directory} cannot be read ({one_line(error)}): "
            "they are incomplete or damaged; remove them, then copy or download them again"
        ) from error


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a whole checkpoint, which may lack the head where embeddings are tied."""
    size, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    # What each projection takes and gives, and whether it has a bias.
    biased = config.attention_bias
    projections = {
        "self_attn.q_proj": (q, size, biased),
        "self_attn.k_proj": (kv, size, biased),
        "self_attn.v_proj": (kv, size, biased),
        "self_attn.o_proj": (size, q, biased and config.model_type != "qwen2"),
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
            if bias:
                shapes[f"{at}.{name}.bias"] = (outs,)
        shapes |= {f"{at}.{name}.weight": (width,) for name, width in norms.items()}
    shapes["model.norm.weight"] = (size,)
    shapes[_HEAD] = (config.vocab_size, size)
    return shapes


@dataclass(frozen=True)
class _Place:
    """A tensor in a safetensors file. start: of its first byte in the file."""

    file: IO[bytes]
    start: int
    shape: tuple[int, ...]
    dtype: str


def _places(directory: Path, opened: ExitStack) -> dict[str, _Place]:
    """All tensors of a checkpoint, in one file or in the shards that an index names, under the
    names of a causal LM; a model that was saved without its head lacks "model." in them."""
    names = [_WHOLE]
    if not (directory / _WHOLE).exists():
        index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    found: dict[str, _Place] = {}
    for name in names:
        with safe_open(str(directory / name), framework="pt"):
            pass  # It is whole, or this raises.
        file = opened.enter_context((directory / name).open("rb", buffering=0))
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for key, entry in header.items():
            start = 8 + size + entry["data_offsets"][0]
            found[key] = _Place(file, start, tuple(entry["shape"]), entry["dtype"])
    if not any(name.startswith("model.") for name in found):
        found = {name if name == _HEAD else f"model.{name}": p for name, p in found.items()}
    return found


@dataclass
class _Reader:
    """Reads tensors for CausalLM, each once, without a map of the file: where memory is paged in
    slowly, a map takes four times as long."""

    places: Mapping[str, _Place]
    dtype: torch.dtype
    device: torch.device
    rounded: bool

    def __call__(self, *names: str) -> Tensor | None:
        places = [self.places[name] for name in names if name in self.places]
        if not places:
            return None
        if len({place.dtype for place in places}) > 1:
            return torch.cat([found for name in names if (found := self(name)) is not None])
        stored = _FLOATING[places[0].dtype]
        sizes = [math.prod(place.shape) * stored.itemsize for place in places]
        found = torch.empty(sum(sizes), dtype=torch.uint8)
        room = found.numpy().data
        for place, size in zip(places, sizes, strict=True):
            _fill(room[:size], place)
            room = room[size:]
        found = found.view(stored).view(-1, *places[0].shape[1:])
        if self.rounded and found.dim() > 1:
            found = found.bfloat16()
        return found.to(self.device, self.dtype)


def _drop_copy(places: dict[str, _Place], reader: _Reader) -> None:
    """A head that is the embedding once more is not held twice. One that differs is the head,
    whatever the configuration says; transformers does the same."""
    head, embedding = reader(_HEAD), reader(_EMBEDDING)
    if head is not None and embedding is not None and torch.equal(head, embedding):
        del places[_HEAD]


def _fill(room: memoryview, place: _Place) -> None:
    place.file.seek(place.start)
    while room:
        count = place.file.readinto(room)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{place.file.name} ends early")
        room = room[count:]


def _check_tensors(config: Config, places: Mapping[str, _Place], directory: Path) -> None:
    shapes = tensor_shapes(config)
    if config.tie_word_embeddings and _HEAD not in places:
        del shapes[_HEAD]
    if missing := sorted(set(shapes) - set(places)):
        raise SharpDraftError(
            f"the weights in {directory} lack {_some(missing)}: the checkpoint is incomplete; copy "
            "or download it again"
        )
    # Weights of another size, or that the architecture's layers have no place for, are another
    # model's.
    strange = sorted(
        name
        for name in set(places) - set(shapes)
        if ".layers." in name and not name.endswith("rotary_emb.inv_freq")
    )
    strange += sorted(name for name, shape in shapes.items() if places[name].shape != shape)
    if strange:
        raise SharpDraftError(
            f"the weights in {directory} do not belong to its config.json: see {_some(strange)}"
        )
    if odd := sorted(name for name in shapes if places[name].dtype not in _FLOATING):
        raise SharpDraftError(
            f"{directory} holds weights of dtype {places[odd[0]].dtype} ({_some(odd)}): use the "
            "full-precision model"
        )


def _own_dtype(config: Config, places: Mapping[str, _Place]) -> torch.dtype:
    """The dtype that config.json names, or else the embedding's."""
    named = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATING.values()}
    return named.get(config.dtype or "", _FLOATING[places[_EMBEDDING].dtype])


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
