"""What is done with each key of a config.json."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.model.keys import CAUSAL_LM, ROPE, Keys

OWN = Keys.of("size", idle="dtype", scale=(1,), flag=(False,), other=())


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"size": 3, "dtype": "x"},
        {"_name_or_path": "x", "_model_name_or_path": "y", "": None},
        {"scale": None, "flag": None, "other": None, "unheard": None},
        {"scale": 1, "flag": False},
        {"scale": 1.0},
    ],
)
def test_values_that_do_nothing_pass(values: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OWN.check(values, "it")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"scale": 2}, "it: scale is 2, which is not supported; supported: 1"),
        ({"scale": True}, "it: scale is True, which is not supported; supported: 1"),
        ({"flag": 0}, "it: flag is 0, which is not supported; supported: False"),
        ({"other": 0}, "it: other is 0, which is not supported"),
        ({"other": list(range(99))}, "it: other is .0, 1, 2.{1,60}, which is not supported"),
    ],
)
def test_others_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SharpDraftError, match=f"^{said}$"):
        OWN.check(values, "it")


def test_what_is_in_no_list_is_noted_in_one_line() -> None:
    with pytest.warns(SharpDraftNote) as caught:
        OWN.check({"b": 1, "size": 2, "a": 0, "c": None}, "it")
    (only,) = caught
    assert "it: not known here and left out: a, b; should" in str(only.message)


def test_of_two_tables_the_other_says_what_holds() -> None:
    both = OWN | Keys.of("scale", idle="size", dtype=("x",), flag=(True,), new=())
    assert both.used == {"scale"} and both.idle == {"size"}
    assert both.neutral == {"dtype": ("x",), "flag": (True,), "other": (), "new": ()}
    assert OWN | Keys() == OWN == Keys() | OWN


@pytest.mark.parametrize("keys", [CAUSAL_LM, *ROPE.values()])
def test_every_key_is_in_one_list(keys: Keys) -> None:
    assert not keys.used & keys.idle
    assert not keys.neutral.keys() & (keys.used | keys.idle)


@pytest.mark.parametrize("made", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_keys_of_transformers_are_known_and_do_nothing(made: Any) -> None:
    """What its classes write of themselves, all defaults included."""
    values = {**vars(made()), **made().to_dict()}
    values = {key: value for key, value in values.items() if not key.startswith("_")}
    CAUSAL_LM.refuse(values, "it")
    assert CAUSAL_LM.unknown(values) == []


# Of published checkpoints of these families, as transformers 4.2 to 4.5 wrote them.
PUBLISHED: list[dict[str, Any]] = [
    {
        "_name_or_path": "/fsx/models",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
    },
    {"max_sequence_length": 4096, "pad_token_id": 0, "pretraining_tp": 2},
    {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}},
    {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28},
    {"unsloth_fixed": True, "unsloth_version": "2025.2", "tokenizer_class": "X", "auto_map": {}},
    {"torchscript": False, "pruned_heads": {}, "id2label": {"0": "LABEL_0"}, "top_k": 50},
]


@pytest.mark.parametrize("values", PUBLISHED)
def test_keys_of_published_checkpoints_are_known(values: dict[str, Any]) -> None:
    CAUSAL_LM.refuse(values, "it")
    assert CAUSAL_LM.unknown(values) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_multiplier", 0.5),
        ("attn_logit_softcapping", 30.0),
        ("attn_temperature_tuning", True),
        ("embedding_multiplier", 12.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.0625),
        ("logits_scaling", 8.0),
        ("no_rope_layers", [1, 1, 0]),
        ("num_nextn_predict_layers", 1),
        ("pruned_heads", {"0": [1]}),
        ("qk_norm", True),
        ("residual_multiplier", 0.2),
        ("rope_local_base_freq", 10_000.0),
    ],
)
def test_what_other_models_compute_is_refused(key: str, value: object) -> None:
    with pytest.raises(SharpDraftError, match=f"it: {key} is "):
        CAUSAL_LM.refuse({key: value}, "it")
