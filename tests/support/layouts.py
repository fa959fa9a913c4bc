"""Checkpoints as they are published, and what is read of them against what transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.checkpoint import read_causal_lm

CPU = torch.device("cpu")
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make(family: str, **changes: Any) -> Any:
    """A random model; norms and biases too, where leaving one out would otherwise not show."""
    config, model_class = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config(**SIZES | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@torch.no_grad()
def check_equal(directory: Path, **how: Any) -> CausalLM:
    """What is read has the logits of what transformers reads."""
    dtype = how.get("dtype")
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype or "auto")
    found = read_causal_lm(directory, device=CPU, **how)
    assert found.dtype == expected.dtype
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    close = 1e-4 if found.dtype == torch.float32 else 0.15
    torch.testing.assert_close(
        found.forward(ids, found.new_cache(48))[0], expected(ids).logits, rtol=close, atol=close
    )
    return found
