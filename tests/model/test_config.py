"""Our own reading of config.json against transformers'."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from sharpdraft.model.config import Config

CLASSES: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
    "eos_token_id",
    "rope_parameters",
)
GIVEN: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": None, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    {"head_dim": 32, "max_position_embeddings": 100, "rope_theta": 5e5},
    {"hidden_act": "gelu", "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"attention_bias": True, "eos_token_id": [3, 4]},
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
    {"use_sliding_window": True, "max_window_layers": 28},
]


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_fields_are_those_of_transformers(family: str, given: dict[str, Any]) -> None:
    values = SIZES | given
    expected = CLASSES[family](**deepcopy(values))
    found = Config.of(values, family)
    for name in FIELDS:
        assert getattr(found, name) == getattr(expected, name), name
    assert found.head_dim == getattr(expected, "head_dim", None) or 64 // 4
    assert found.source == values
    if family != "llama":
        assert list(found.layer_types) == expected.layer_types
    assert found.attention_bias == (family == "qwen2" or expected.attention_bias)


def test_what_transformers_writes_is_read() -> None:
    for family, made in CLASSES.items():
        expected = made(**SIZES)
        found = Config.of(expected.to_dict())
        assert found.model_type == family
        assert found.source == expected.to_dict()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "wide"}, "hidden_size must be an integer of at least 1, got 'wide'"),
        ({"vocab_size": None}, "vocab_size must be an integer of at least 1, got None"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer of at least 1"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads is 4, no multiple of num_key_value_heads, 3",
        ),
        ({"head_dim": 7}, "head_dim is 7: rotary positions need an even one"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number of at least 0"),
        ({"rope_theta": -1}, "rope_theta must be a number of at least 0"),
        ({"rope_parameters": "yarn"}, "rope_parameters must be a mapping"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them"),
        ({"layer_types": ["full_attention"]}, "for each of 3 layers"),
        ({"layer_types": "full_attention"}, "layer_types must name one of"),
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false, got 'yes'"),
        ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ({"model_type": "gpt2"}, "model_type is gpt2, none of llama, qwen2, qwen3"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "rope_scaling and rope_parameters contradict each other",
        ),
    ],
)
def test_values_that_are_none(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config.of({"model_type": "llama"} | SIZES | changes)
