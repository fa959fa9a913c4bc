"""Rotary tables against transformers', to the bit."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.model.config import Config
from sharpdraft.model.rotary import ROPE_TYPES, head_order, in_order, rotary_of, rotate

SIZES: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 128,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 300,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
FACTORS = [1.0 + i / 8 for i in range(32)]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": FACTORS,
    "long_factor": [3 * each for each in FACTORS],
}
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
    "longrope": {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 100}},
    "longrope, length beside it": {
        "rope_scaling": {"type": "longrope"}
        | {k: LONGROPE[k] for k in ("short_factor", "long_factor")},
        "original_max_position_embeddings": 50,
        "rope_theta": 1e6,
    },
    "longrope, factor": {
        "rope_parameters": LONGROPE | {"original_max_position_embeddings": 64, "factor": 2}
    },
    "longrope, attention factor": {
        "rope_parameters": LONGROPE
        | {"original_max_position_embeddings": 64, "attention_factor": 1.5, "factor": 1}
    },
    "longrope without its length": {"rope_parameters": LONGROPE},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tables_are_those_of_transformers(family: str, way: str) -> None:
    values = SIZES | {"head_dim": 64} | WAYS[way]
    made: Any = LlamaConfig if family == "llama" else Qwen3Config
    module: Any = LlamaRotaryEmbedding if family == "llama" else Qwen3RotaryEmbedding
    rotary = rotary_of(Config.of(values, family), 300)
    for length in (20, 64, 65, 300):
        # A fresh one each time: longrope's keeps what it last used.
        embedding = module(made(**deepcopy(values)))
        cos, sin = embedding(torch.zeros(1), torch.arange(length)[None])
        half = cos.shape[-1] // 2
        found = rotary.at(0, length)
        assert torch.equal(found[0], cos[0])
        assert torch.equal(found[1], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1))


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
        ({"rope_type": "dynamic", "factor": 2.0}, "each engine does it otherwise"),
        ({"rope_type": "mrope"}, "of type 'mrope' are not supported .they are of images"),
        ({"rope_type": "su"}, "'su' are not supported; supported: default, linear, llama3, yarn"),
        ({"type": "ntk", "factor": 2.0}, "of type 'ntk' are not supported"),
        ({"mrope_section": [2, 3, 3]}, "'default': mrope_section is .2, 3, 3., which is not supp"),
        ({"rope_type": "longrope"}, "need a list short_factor of 32 numbers, got None"),
        (LONGROPE | {"short_factor": [1.0] * 31}, "short_factor of 32 numbers, got 31 of them"),
        (LONGROPE | {"long_factor": [1.0] * 31 + ["2"]}, "number long_factor above 0, got '2'"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "must be above 1, got 1"),
        (YARN | {"beta_fast": "fast"}, "need a number beta_fast above 0, got 'fast'"),
        (YARN | {"factor": 0}, "need a number factor above 0, got 0"),
        ({"rope_theta": 1}, "rope_theta must be above 1, got 1"),
        ({"rope_type": "linear"}, "of type 'linear' need a number factor above 0, got None"),
        (LLAMA3 | {"low_freq_factor": "1"}, "need a number low_freq_factor above 0, got '1'"),
    ],
)
def test_what_there_are_no_tables_for(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(SharpDraftError, match=said):
        rotary_of(Config.of(SIZES | {"rope_parameters": parameters}, "llama"), 50)


def test_a_parameter_that_the_type_does_not_know_is_noted() -> None:
    values = SIZES | {"rope_parameters": {"rope_type": "default", "factor": 4.0, "beta": 1}}
    with pytest.warns(SharpDraftNote, match="type 'default': .* left out: beta, factor;"):
        rotary_of(Config.of(values, "llama"), 50)


@pytest.mark.parametrize("since", [None, 0, 5, 30, 64, 70])
def test_tables_of_a_text_that_becomes_long(since: int | None) -> None:
    """Which table a position has: by where long texts began to be read, or else pass by pass."""
    values = SIZES | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64}}
    rotary = rotary_of(Config.of(values, "llama"), 100)
    short, long = rotary.at(0, 64)[0], rotary.at(0, 65)[0]
    long = torch.cat((long, rotary.at(65, 35)[0]))
    assert rotary.limit == 64 and not torch.equal(short, long[:64])
    for start, count in ((0, 10), (0, 100), (28, 4), (60, 4), (60, 9), (64, 1), (90, 10)):
        cos, sin = rotary.at(start, count, since)
        assert len(cos) == len(sin) == count
        for place, at in enumerate(range(start, start + count)):
            own = at >= min(64, since) if since is not None else start + count > 64
            assert torch.equal(cos[place], long[at] if own else short[at]), (start, count, at)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("part", [1.0, 0.5, 0.25, 0.75])
def test_order_of_a_heads_dimensions(part: float, interleaved: bool) -> None:
    """Queries and Keys in that order, turned by the tables, have the products of those that are
    turned pair by pair."""
    values = SIZES | {"partial_rotary_factor": part, "rope_interleaved": interleaved}
    config = Config.of(values, "llama")
    order, rotary = head_order(config), rotary_of(config, 50)
    assert (order is None) == (part == 1.0 and not interleaved)
    x = torch.randn(3, 64, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = x.clone()
    count = round(64 * part)
    for pair in range(count // 2):
        one, other = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + count // 2)
        angle = torch.arange(20, 27).double() * 10_000.0 ** (-2 * pair / count)
        turned[:, one] = x[:, one] * angle.cos() - x[:, other] * angle.sin()
        turned[:, other] = x[:, other] * angle.cos() + x[:, one] * angle.sin()
    placed = in_order(x.flatten(0, 1), order, 3).view(3, 64, 7).mT
    found = rotate(placed, *(table.double() for table in rotary.at(20, 7)))
    expected = turned if order is None else turned[:, order]
    torch.testing.assert_close(found.mT, expected, rtol=1e-5, atol=1e-5)


def test_only_the_heads_asked_for_are_put_in_order() -> None:
    order = head_order(Config.of(SIZES | {"is_neox_style": False}, "llama"))
    assert order is not None and sorted(order.tolist()) == list(range(64))
    rows = torch.arange(200.0)
    found = in_order(rows, order, 2)
    assert torch.equal(found[:64], rows[order]) and torch.equal(found[64:128], rows[64:128][order])
    assert torch.equal(found[128:], rows[128:])
    assert in_order(rows, None, 2) is rows


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"partial_rotary_factor": 0.01}, "must leave an even number of the 64 dimensions"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor must be a number"),
        ({"is_neox_style": "no"}, "is_neox_style must be true or false"),
        (
            {"is_neox_style": True, "rope_interleaved": True},
            "is_neox_style and rope_interleaved contradict each other",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "parameters for full_attention: one set for all layers",
        ),
    ],
)
def test_what_does_not_say_how_heads_turn(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config.of(SIZES | changes, "llama")


def test_what_stands_among_the_parameters_comes_first() -> None:
    values = SIZES | {
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
    }
    assert Config.of(values, "llama").rotary_dim == 16
    assert Config.of(SIZES | {"partial_rotary_factor": 0.5}, "llama").rotary_dim == 32
