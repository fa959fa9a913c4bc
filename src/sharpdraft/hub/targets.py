"""Targets, loaded: the model and its tokenizer.

Everything that can be wrong with a checkpoint ends as one SharpDraftError, chained from what caused
it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import SharpDraftError, one_line
from ..model.causal_lm import CausalLM
from ..model.checkpoint import read_causal_lm, read_config
from ..model.config import Config
from .checkpoints import target_dir

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WITHOUT_WEIGHTS = ("*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt")
# Classes with nothing of their own. Of Qwen 2 AutoTokenizer takes another class than it is told.
_PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_target(
    name: str,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    rounded: bool = False,
    tokenizer: Any = None,
) -> tuple[CausalLM, Any]:
    """The target called `name` and its tokenizer.

    name: SMOLLM2, a local directory in transformers' format, or a hub id. device: CUDA if there is
    one, else MPS, else CPU. dtype: float32 on CPU and MPS, else the checkpoint's own. weight_dtype:
    as in CausalLM. rounded: round matrices to bfloat16 first, which a CPU then reads in half the
    memory (see Linear); another model, strictly. tokenizer: its tokenizer, where that is read
    already.

    `target.config.eos_token_id` is the generation config's where it has one: all tokens that end a
    turn.

    Raises SharpDraftError, before weights are read or downloaded where the configuration shows it.
    """
    where = pick_device(device)
    if dtype is None and where.type != "cuda":
        dtype = torch.float32
    config = read_config(target_dir(name, files=("config.json",)))
    directory = target_dir(name)
    if tokenizer is None:
        tokenizer = _tokenizer(directory, config)
    try:
        target = read_causal_lm(
            directory, device=where, dtype=dtype, weight_dtype=weight_dtype, rounded=rounded
        )
    except torch.OutOfMemoryError as error:
        raise SharpDraftError(
            f"'{name}' does not fit into the memory of {where}: use a smaller dtype, another "
            "device or a smaller model"
        ) from error
    target.config = replace(config, eos_token_id=_ends(directory, config))
    return target, tokenizer


def read_tokenizer(name: str) -> Any:
    """The tokenizer of the target `name`, without its weights. Raises SharpDraftError as
    load_target does."""
    directory = target_dir(name, files=_WITHOUT_WEIGHTS)
    return _tokenizer(directory, read_config(directory))


def load_tokenizer(name: str) -> tuple[Path, Any, int, tuple[int, ...]]:
    """What an engine that loads the weights itself needs of the target `name`: its directory, its
    tokenizer, its longest context in tokens and the tokens that end a turn. Raises SharpDraftError
    as load_target does."""
    directory = target_dir(name)
    config = read_config(directory)
    ends = stop_tokens(_ends(directory, config))
    return directory, _tokenizer(directory, config), config.max_position_embeddings, ends


def stop_tokens(ends: int | Sequence[int] | None) -> tuple[int, ...]:
    """The tokens that end a turn, from a configuration's eos_token_id."""
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def _ends(directory: Path, config: Config) -> int | list[int] | None:
    """eos_token_id of the generation config where it has one."""
    path = directory / "generation_config.json"
    if not path.exists():
        return config.eos_token_id
    try:
        read = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(read, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise SharpDraftError(
            f"{path} cannot be read as a generation configuration: {one_line(error)}"
        ) from error
    ends = read.get("eos_token_id")
    each = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if any(type(end) is not int or not 0 <= end < config.vocab_size for end in each):
        raise SharpDraftError(
            f"{path}: eos_token_id is {ends!r}, and the target has tokens 0 to "
            f"{config.vocab_size - 1}"
        )
    return ends if each else config.eos_token_id


def _tokenizer(directory: Path, config: Config) -> Any:
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise SharpDraftError(
            f"{directory} holds no tokenizer: copy {_TOKENIZER_FILES[0]} of the model there"
        )
    from .quiet import quiet_transformers

    try:
        with quiet_transformers():
            return _tokenizer_class(directory, config).from_pretrained(
                directory, trust_remote_code=False
            )
    except Exception as error:
        raise SharpDraftError(
            f"the tokenizer in {directory} cannot be read: {one_line(error)}"
        ) from error


def _tokenizer_class(directory: Path, config: Config) -> Any:
    """The class that AutoTokenizer would find, without AutoTokenizer where tokenizer.json is all
    that matters: it imports transformers' models, which takes two seconds."""
    path = directory / "tokenizer_config.json"
    named = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    plain = named.get("tokenizer_class") in _PLAIN and "auto_map" not in named
    if plain and config.model_type != "qwen2" and (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def pick_device(name: str | None) -> torch.device:
    if name is None:
        name = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise SharpDraftError(f"there is no device '{name}' here: {one_line(error)}") from error
