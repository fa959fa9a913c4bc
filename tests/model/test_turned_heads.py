"""Heads of which a part turns, or neighbours do, against a model written out pair by pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpdraft import Session
from sharpdraft.model import rotary
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.checkpoint import read_causal_lm
from support.reference import Plain, Rule, lm_logits
from support.tiny import VOCAB, make_model

CPU = torch.device("cpu")
WAYS: list[dict[str, Any]] = [
    {"partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 0.75, "head_dim": 16},
    {"rope_interleaved": True},
    {"rope_interleaved": True, "attention_bias": True},
    {"is_neox_style": False, "partial_rotary_factor": 0.25},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
]


def saved(family: str, way: dict[str, Any], directory: Path) -> Plain:
    """A checkpoint that says so, and its model by hand."""
    dim, biased = way.get("head_dim", 8), way.get("attention_bias", False)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": dim, "attention_bias": biased}
    model = make_model(family, **sizes, initializer_range=0.3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    path = directory / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    path.write_text(json.dumps(values | way))
    rules = [Rule(i, True, None, 0, lambda keys, layer: 0.0) for i in range(2)]
    plain = Plain(model.state_dict(), 4, 2, dim, rules)
    nested = way.get("rope_parameters", {})
    part = way.get("partial_rotary_factor", nested.get("partial_rotary_factor", 1.0))
    plain.rotary_dim = round(dim * part)
    plain.interleaved = way.get("rope_interleaved", False) or not way.get("is_neox_style", True)
    return plain


def text(count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def far(target: CausalLM, plain: Plain) -> float:
    """How far logits are from those by hand; behind a prompt in chunks, then token by token."""
    tokens = text(30)
    expected = lm_logits(plain, tokens).float()
    cache = target.new_cache(40)
    spans = ((0, 11), (11, 20), (20, 21), (21, 22), (22, 30))
    parts = [target.forward(torch.tensor([tokens[a:b]]), cache)[0] for a, b in spans]
    return float((torch.cat(parts, 1)[0] - expected).abs().max())


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_by_hand(
    family: str,
    way: dict[str, Any],
    kernels: bool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    request.getfixturevalue("compiled" if kernels else "without_kernels")
    plain = saved(family, way, tmp_path)
    assert far(read_causal_lm(tmp_path, device=CPU), plain) < 2e-4
    session = Session(read_causal_lm(tmp_path, device=CPU))
    logits = session.read(text(30))
    assert torch.allclose(logits[0, 0], lm_logits(plain, text(30))[-1].float(), atol=2e-4)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_it_would_be_seen(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Were the order of dimensions not minded."""
    plain = saved("qwen3", way, tmp_path)
    monkeypatch.setattr("sharpdraft.model.causal_lm.head_order", lambda config: None)
    assert far(read_causal_lm(tmp_path, device=CPU), plain) > 1e-2
    monkeypatch.undo()
    assert rotary.head_order(read_causal_lm(tmp_path, device=CPU).config) is not None
