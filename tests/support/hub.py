"""Small checkpoints of the families that are read, and what is said of broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sharpdraft.errors import SharpDraftError
from sharpdraft.hub.targets import load_target

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    if family == "llama":
        config = LlamaConfig(
            **SIZES,
            num_hidden_layers=3,
            head_dim=8,
            tie_word_embeddings=True,
            rope_parameters=LLAMA3_ROPE,
        )
        model: Any = LlamaForCausalLM(config)
    elif family == "qwen2":
        model = Qwen2ForCausalLM(
            Qwen2Config(**SIZES, num_hidden_layers=4, tie_word_embeddings=False)
        )
    else:
        config = Qwen3Config(**SIZES, num_hidden_layers=2, head_dim=16, tie_word_embeddings=True)
        model = Qwen3ForCausalLM(config)
    with (
        torch.no_grad()
    ):  # Norms start at one and biases at zero, where leaving them out would not show.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def save(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    letters = Tokenizer(BPE({chr(33 + i): i for i in range(94)} | {"Ġ": 94, "<end>": 95}, []))
    letters.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>").save_pretrained(directory)
    return directory


def load_error(name: Path | str) -> str:
    with pytest.raises(SharpDraftError) as caught:
        load_target(str(name), device="cpu")
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
