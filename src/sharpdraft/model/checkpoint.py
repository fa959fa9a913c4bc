"""A causal LM's directory, read: config.json and safetensors.

Everything that can be wrong with one is a SharpDraftError, found before the weights are read where
the configuration shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
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
            stored = _Stored(_open(directory, opened))
            _check_tensors(config, stored, directory)
            weights = _Weights(stored, dtype or _own_dtype(config, stored), device, rounded)
            return CausalLM(config, weights, weight_dtype=weight_dtype)
    except (SharpDraftError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise SharpDraftError(
            f"the weights in {directory} cannot be read ({one_line(error)}): "
            "they are incomplete or damaged; remove them, then copy or download them again"
        ) from error


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a whole checkpoint; tied embeddings are stored once, under the
    embedding's name."""
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
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, size)
    return shapes


def _open(directory: Path, opened: ExitStack) -> list[Any]:
    """The file of weights, or all shards that the index names."""
    names = [_WHOLE]
    if not (directory / _WHOLE).exists():
        index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    return [
        opened.enter_context(safe_open(str(directory / name), framework="pt")) for name in names
    ]


class _Stored:
    """Which file holds each tensor, under the names that causal LMs have; of a model saved without
    its head they lack "model."."""

    def __init__(self, files: Sequence[Any]) -> None:
        held = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        bare = not any(name.startswith("model.") for name in held)
        self.names = {
            f"model.{name}" if bare and name != _HEAD else name: (file, name)
            for name, file in held.items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored = self.names[name]
        return tuple(file.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        file, stored = self.names[name]
        return str(file.get_slice(stored).get_dtype())

    def tensor(self, name: str) -> Tensor:
        file, stored = self.names[name]
        found: Tensor = file.get_tensor(stored)
        return found


@dataclass
class _Weights(Mapping[str, Tensor]):
    """Tensors as CausalLM takes them, each read when it is asked for. One that is stored as it is
    wanted is a view of its file, of which the system reads what is used."""

    stored: _Stored
    dtype: torch.dtype
    device: torch.device
    rounded: bool

    def __getitem__(self, name: str) -> Tensor:
        found = self.stored.tensor(name)
        if self.rounded and found.dim() > 1:
            found = found.bfloat16()
        return found.to(self.device, self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored.names)

    def __len__(self) -> int:
        return len(self.stored.names)


def _check_tensors(config: Config, stored: _Stored, directory: Path) -> None:
    shapes = tensor_shapes(config)
    if missing := sorted(set(shapes) - set(stored.names)):
        raise SharpDraftError(
            f"the weights in {directory} lack {_some(missing)}: the checkpoint is incomplete; copy "
            "or download it again"
        )
    # Weights of another size, or that the architecture's layers have no place for, are another
    # model's.
    strange = sorted(
        name
        for name in set(stored.names) - set(shapes)
        if ".layers." in name and not name.endswith("rotary_emb.inv_freq")
    )
    strange += sorted(name for name, shape in shapes.items() if stored.shape(name) != shape)
    if strange:
        raise SharpDraftError(
            f"the weights in {directory} do not belong to its config.json: see {_some(strange)}"
        )
    if odd := sorted(name for name in shapes if stored.dtype(name) not in _FLOATING):
        raise SharpDraftError(
            f"{directory} holds weights of dtype {stored.dtype(odd[0])} ({_some(odd)}): use the "
            "full-precision model"
        )


def _own_dtype(config: Config, stored: _Stored) -> torch.dtype:
    """The dtype that config.json names, or else the embedding's."""
    named = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATING.values()}
    return named.get(config.dtype or "", _FLOATING[stored.dtype(_EMBEDDING)])


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
