"""Rotary tables against transformers', to the bit."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from sharpdraft.errors import SharpDraftError
from sharpdraft.model.config import Config
from sharpdraft.model.rotary import ROPE_TYPES, rotary_of, rotate

SIZES: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 128,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 300,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# As published files have them: today's form, and that of transformers 4.
WAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta": {"rope_theta": 1e6},
    "parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000}},
    "scaling null": {"rope_theta": 500000.0, "rope_scaling": None},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000.0},
    "linear by a third": {"rope_parameters": {"rope_type": "linear", "factor": 3}},
    "llama3": {
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64},
        "rope_theta": 500000.0,
    },
    "llama3 without its length": {"rope_parameters": LLAMA3},
    "yarn": {"rope_scaling": YARN | {"original_max_position_embeddings": 75}, "rope_theta": 1e6},
    "yarn, old name": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, length beside it": {"rope_scaling": YARN, "original_max_position_embeddings": 32},
    "yarn, everything": {
        "rope_parameters": YARN
        | {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 0.7}
    },
    "yarn, mscale": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}},
    "yarn that does nothing": {"rope_parameters": YARN | {"factor": 1}},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tables_are_those_of_transformers(family: str, way: str) -> None:
    values = SIZES | WAYS[way]
    made: Any = LlamaConfig if family == "llama" else Qwen3Config
    module: Any = LlamaRotaryEmbedding if family == "llama" else Qwen3RotaryEmbedding
    cos, sin = module(made(**deepcopy(values)))(torch.zeros(1), torch.arange(300)[None])
    rotary = rotary_of(Config.of(values, family), 300)
    half = cos.shape[-1] // 2
    assert torch.equal(rotary.cos, cos[0])
    assert torch.equal(rotary.sin, torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1))


def test_every_type_is_tried() -> None:
    given = (w.get("rope_parameters") or w.get("rope_scaling") or {} for w in WAYS.values())
    assert {g.get("rope_type", g.get("type", "default")) for g in given} == set(ROPE_TYPES)


def test_rotating_is_that_of_transformers() -> None:
    rotary = rotary_of(Config.of(SIZES, "llama"), 50)
    module = LlamaRotaryEmbedding(LlamaConfig(**SIZES))
    x = torch.randn(2, 3, 7, 64, generator=torch.Generator().manual_seed(0))
    for start in (0, 1, 43):
        cos, sin = module(x, torch.arange(start, start + 7)[None])
        expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
        found = rotate(x, rotary.cos[start : start + 7], rotary.sin[start : start + 7])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "of type 'dynamic' are not supported"),
        ({"rope_type": "longrope"}, "supported: default, linear, llama3, yarn"),
        ({"rope_type": "linear"}, "of type 'linear' need a number factor, got None"),
        (LLAMA3 | {"low_freq_factor": "1"}, "need a number low_freq_factor, got '1'"),
        ({"partial_rotary_factor": 0.5}, "on a part of each head"),
    ],
)
def test_what_there_are_no_tables_for(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(SharpDraftError, match=said):
        rotary_of(Config.of(SIZES | {"rope_parameters": parameters}, "llama"), 50)
