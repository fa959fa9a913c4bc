"""One key of a config.json changed at random: it is done as the reference does it, or refused, or,
of a key that nobody knows, noted and left out."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sharpdraft.drafters.registry import load_drafter
from sharpdraft.errors import SharpDraftError
from support.dflash import FULL, SLIDING
from support.drafters import drafter_config, drafter_tensors
from support.eagle_plain import Chain
from support.families import eagle_config, eagle_tensors, make_pard
from support.published import check_says, noted, over_target, speculators, write
from support.tiny import BLOCK, VOCAB, Tiny
from support.zlab import peer, zlab_says

pytest.importorskip("dflash")

COUNT, TEXT = 2, 24
"""Tokens that are drafted, and a text's."""

JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    2.5,
    1e9,
    "",
    "silu",
    "x",
    [],
    [0],
    [2, 1],
    {},
]
JUNK += [["a"], {"a": 1}, [None], 10**12, float("nan"), "1"]
MEANT: dict[str, list[Any]] = {
    "hidden_act": ["silu", "gelu", "relu", "swish"],
    "rope_theta": [10_000, 500.0, 1_000_000.0],
    "rope_scaling": [
        {"rope_type": "default"},
        {"type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn"},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "factor": 2.0},
        {"rope_type": "linear", "factor": "4"},
    ],
    "rms_norm_eps": [1e-6, 1e-2, 0.1],
    "num_attention_heads": [2, 3, 4, 6, 12],
    "num_key_value_heads": [1, 2, 3, 4, 5],
    "head_dim": [4, 7, 8, 16],
    "hidden_size": [16, 32, 64],
    "intermediate_size": [40, 48, 64],
    "num_hidden_layers": [1, 2, 3],
    "vocab_size": [40, 63, 64, 65, 128],
    "layer_types": [[FULL], [SLIDING], [FULL] * 2, [SLIDING, FULL], ["linear_attention"] * 2],
    "sliding_window": [1, 4, 9, 4096],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 2],
    "max_position_embeddings": [8, 64, 256, 4096],
    "attention_bias": [True, False],
    "mlp_bias": [True],
    "logit_scale": [0.5, 1.0],
    "is_neox_style": [True, False],
    "partial_rotary_factor": [0.5, 0.25, 1.0, 0.3],
    "is_causal": [True, False],
    "tie_word_embeddings": [True, False],
    "architectures": [["LlamaForCausalLM"], ["MedusaModel"], [], "DFlashDraftModel", [7]],
    "dtype": ["float32", "float16", "int8"],
    "quantization_config": [{"quant_method": "awq"}],
    "eos_token_id": [1, [1, 2]],
    "initializer_range": [0.1],
    "output_multiplier": [2.0],
    "final_logit_softcapping": [2.0],
    "no_such_key": [1, "x"],
}
OF: dict[str, dict[str, list[Any]]] = {
    "dflash": {
        "block_size": [2, 3, 6, 16],
        "num_target_layers": [3, 4, 36],
        "dflash_config": [{}, {"mask_token_id": 3}, {"target_layer_ids": [0, 2]}, [1]],
        "dflash_config.mask_token_id": [0, 3, 63, 64, -1],
        "dflash_config.target_layer_ids": [[0, 2], [2, 0], [1, 3], [0, 4], [-1, 2], [0], [0, 0]],
        "dflash_config.causal": [True, False],
        "dflash_config.use_swa": [True, False],
        "dflash_config.attention_sink_bias": [True, False],
        "dflash_config.block_size": [2, 6],
        "target_layer_ids": [[0, 2], [0, 1]],
        "mask_token_id": [3, 4],
        "sample_from_anchor": [True, False],
        "target_hidden_size": [16, 32],
        "draft_vocab_size": [40, 64],
    },
    "eagle3": {
        "eagle_aux_hidden_state_layer_ids": [[1, 2, 3], [3, 2, 1], [0, 1, 2], [1, 2], [2, 3, 5]],
        "draft_vocab_size": [40, 64, 80],
        "fc_norm": [True, False],
        "norm_output": [True, False],
        "norm_before_residual": [True, False],
        "norm_before_fc": [True, False],
        "eagle_config": [{}, {"use_aux_hidden_state": False}, {"norm_before_fc": True}, [1]],
        "target_hidden_size": [16, 32],
    },
    "pard": {"pard_token": [0, 3, 63, 64, -1], "num_drafts": [1, 5, 40], "spd_type": ["pard2"]},
}

REFUSED: list[tuple[str, Any]] = [
    ("attention_bias", True),
    ("dflash_config.attention_sink_bias", True),
    ("eagle_config", {"use_aux_hidden_state": False}),
    ("final_logit_softcapping", 2.0),
    ("hidden_act", "gelu"),
    ("hidden_act", "relu"),
    ("num_hidden_layers", 3),
    ("quantization_config", {"quant_method": "awq"}),
    ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
    ("sample_from_anchor", True),
    ("spd_type", "pard2"),
]
"""What no reference is asked about."""

OF_NO_MEANING = ("architectures", "dtype", "eos_token_id", "initializer_range")
"""To a drafter; transformers' classes are particular about them."""


def changes(family: str, nested: bool) -> st.SearchStrategy[tuple[str, Any]]:
    pool = MEANT if nested else MEANT | OF[family]
    if family == "pard":
        # What transformers does not read in a language model.
        unread = ("is_causal", "is_neox_style", "partial_rotary_factor")
        pool = {k: v for k, v in pool.items() if k not in unread}
    keys = st.sampled_from(sorted(pool))
    return keys.flatmap(
        lambda key: st.tuples(st.just(key), st.sampled_from(pool[key]) | st.sampled_from(JUNK))
    )


def changed(config: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(dict(config))
    outer, _, inner = key.rpartition(".")
    (found[outer] if outer else found)[inner] = copy.deepcopy(value)
    return found


def nest(config: Mapping[str, Any]) -> dict[str, Any]:
    """speculators' layout of a DFlash."""
    outer = {"aux_hidden_state_layer_ids": [0, 2], "block_size": BLOCK, "mask_token_id": 3}
    return speculators("dflash", config, outer, draft_vocab_size=VOCAB)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, with what DFlash says inside on top."""
    inner = config.get("dflash_config") or {}
    return {k: v for k, v in {**config, **inner}.items() if v is not None}


def rotary(config: Mapping[str, Any], dim: int) -> dict[str, Any]:
    return {
        "turned": int(dim * config.get("partial_rotary_factor", 1.0)),
        "halves": config.get("is_neox_style", True),
    }


def dflash_says(config: dict[str, Any], tensors: dict[str, Tensor], tiny: Tiny) -> Tensor:
    """Of a config that is taken: z-lab's module told the same."""
    given = flat(config)
    told = ("partial_rotary_factor", "is_neox_style", *OF_NO_MEANING)
    plain = {k: v for k, v in config.items() if k not in told and v is not None}
    plain |= {"rms_norm_eps": float(given.get("rms_norm_eps", 1e-6))}
    plain |= {"num_target_layers": given.get("num_target_layers", 4)}
    if config.get("is_causal") is None and given.get("causal") is not None:
        plain["is_causal"] = given["causal"]
    model = peer(plain, tensors, **rotary(given, given.get("head_dim", 8)))
    scale = given.get("logit_scale", 1.0) * given.get("output_multiplier", 1.0)
    return zlab_says(model, tiny, scale=scale, text=tiny.text[:TEXT], count=COUNT)


def eagle3_says(config: dict[str, Any], tensors: dict[str, Tensor], tiny: Tiny) -> Tensor:
    given = flat(config)
    ids = given.get("eagle_aux_hidden_state_layer_ids", (2, 2, 1))
    sliding = given.get("layer_types") == [SLIDING]
    rope = {k: given[k] for k in ("rope_theta", "rope_scaling") if k in given}
    chain = Chain(
        tensors,
        taps=[i - 1 for i in ids],
        window=given.get("sliding_window") if sliding else None,
        normed_residual=given.get("norm_before_residual", False),
        normed_state=given.get("norm_output", False),
        rope=rope | {"max_position_embeddings": given.get("max_position_embeddings", 2048)},
        scale=given.get("logit_scale", 1.0),
        eps=given.get("rms_norm_eps", 1e-6),
        **rotary(given, 8),
    )
    return chain.says(tiny, tiny.text[:TEXT], COUNT)


def pard_says(config: dict[str, Any], tensors: dict[str, Tensor], tiny: Tiny) -> Tensor:
    given = {k: v for k, v in config.items() if k not in OF_NO_MEANING and v is not None}
    given |= {"rms_norm_eps": float(given.get("rms_norm_eps", 1e-6))}
    given |= {"use_cache": False, "tie_word_embeddings": False}  # It has a head of its own.
    model = LlamaForCausalLM(LlamaConfig(**given))
    model.load_state_dict(tensors)
    ids = torch.tensor([tiny.text[:TEXT] + [config["pard_token"]] * (COUNT - 1)])
    with torch.inference_mode():
        return over_target(model.eval()(ids).logits[0, -COUNT:, :VOCAB])


@cache
def whole(family: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if family == "dflash":
        return drafter_config(), drafter_tensors(drafter_config())
    model = make_pard()
    return model.config.to_diff_dict() | {"pard_token": 3}, dict(model.state_dict())


@pytest.mark.parametrize(
    ("family", "nested"), [("dflash", False), ("dflash", True), ("eagle3", False), ("pard", False)]
)
def test_one_key_changed(
    llama: Tiny, tmp_path_factory: pytest.TempPathFactory, family: str, nested: bool
) -> None:
    says = {"dflash": dflash_says, "eagle3": eagle3_says, "pard": pard_says}[family]
    if family == "eagle3":
        config = eagle_config()
        tensors = eagle_tensors(config, llama.target)
    else:
        config, tensors = whole(family)
    base = says(config, tensors, llama)
    folder: Path = tmp_path_factory.mktemp(family)
    write(folder, config, tensors)

    @settings(
        max_examples=300,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(change=changes(family, nested))
    @example(change=("no_such_key", 1))
    @example(change=("hidden_act", "gelu"))
    @example(change=("rope_theta", 500.0))
    @example(change=("rms_norm_eps", 0.1))
    def check(change: tuple[str, Any]) -> None:
        new = changed(config, *change)
        (folder / "config.json").write_text(json.dumps(nest(new) if nested else new))
        try:
            drafter, notes = noted(lambda: load_drafter(folder, llama.target))
        except SharpDraftError:
            return
        assert change not in REFUSED
        if drafter.new_cache(TEXT).capacity < TEXT + COUNT:
            return  # A session goes on without it.
        try:
            noted_only = change[0] not in OF[family] and any(change[0] in note for note in notes)
            right = base if noted_only else says(new, tensors, llama)
        except Exception:
            right = base  # Of no kind that there is: taken only where it says nothing.
        check_says(drafter, llama, right, llama.text[:TEXT])

    check()
