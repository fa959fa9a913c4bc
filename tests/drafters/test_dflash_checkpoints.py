"""DFlash checkpoints that load, and what is said of those that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpdraft.decode.session import Session
from sharpdraft.drafters.dflash import DFlash, save
from sharpdraft.errors import SharpDraftError
from sharpdraft.method.policies import FixedSlope
from sharpdraft.method.visible import View
from sharpdraft.model.causal_lm import CausalLM
from support.dflash import FULL, SLIDING, WINDOW
from support.drafters import drafter_config, drafter_tensors, make_drafter
from support.tiny import BLOCK, POSITIONS, VOCAB, Tiny, make_model


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, [(False, None)] * 2),
        ({"layer_types": [SLIDING, FULL], **WINDOW}, [(True, 24), (False, None)]),
        (
            {"layer_types": [SLIDING, FULL], **WINDOW, "is_causal": False},
            [(False, 24), (False, None)],
        ),
        ({"layer_types": [FULL, FULL], "is_causal": True}, [(True, None)] * 2),
        ({"causal": True}, [(True, None)] * 2),
        ({"causal": True, "is_causal": False}, [(False, None)] * 2),
        ({"use_swa": True, "swa_window_size": 16}, [(False, 16)] * 2),
        ({"use_swa": True, **WINDOW}, [(False, 24)] * 2),
    ],
)
def test_layer_kinds(
    llama: Tiny, changes: dict[str, Any], kinds: list[tuple[bool, int | None]]
) -> None:
    inner = {k: v for k, v in changes.items() if k in ("causal", "use_swa", "swa_window_size")}
    outer = {k: v for k, v in changes.items() if k not in inner}
    dflash = drafter_config()["dflash_config"] | inner
    assert make_drafter(llama.target, **outer, dflash_config=dflash).views == tuple(
        View(*k) for k in kinds
    )


def load_error(
    target: CausalLM, config: dict[str, Any], tensors: dict[str, Tensor], folder: Path
) -> str:
    save(folder, config, tensors)
    return error_of(folder, target)


def error_of(folder: Path, target: CausalLM) -> str:
    with pytest.raises(SharpDraftError) as caught:
        DFlash.load(folder, target)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "its hidden size is 48, the target's 32"),
        ({"vocab_size": None}, "config.json is not one of a DFlash checkpoint"),
        ({"num_target_layers": 36}, "its number of target layers is 36, the target's 4"),
        (
            {"target_layer_ids": [0, 4]},
            "its list of target layer ids is [0, 4], the target's layers are 0 to 3",
        ),
        ({"target_layer_ids": [-1, 2]}, "its list of target layer ids is [-1, 2]"),
        ({"mask_token_id": 64}, "its mask token id is 64"),
        ({"mask_token_id": -1}, "its mask token id is -1"),
        (
            {"mask_token_id": None},
            "no integer mask_token_id",
        ),
        (
            {"target_layer_ids": None},
            "no dflash_config.target_layer_ids: is it a DFlash checkpoint?",
        ),
        ({"block_size": 1}, "block_size is 1: a block needs at least 2 tokens"),
        (
            {"layer_types": [SLIDING, FULL]},
            "sliding-window layers but its config gives no sliding_window",
        ),
    ],
)
def test_wrong_config(llama: Tiny, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = drafter_config()
    tensors = drafter_tensors(config)
    for key, value in changes.items():
        (config["dflash_config"] if key in config["dflash_config"] else config)[key] = value
    assert message in load_error(llama.target, config, tensors, tmp_path)


def edit(change: Callable[[dict[str, Tensor]], Any]) -> dict[str, Tensor]:
    tensors = drafter_tensors(drafter_config())
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "lacks 1 tensors, first norm.weight"),
        (
            lambda t: [t.pop(k) for k in list(t) if k.startswith("layers.1")],
            "lacks 11 tensors, first layers.1.",
        ),
        (
            lambda t: t.update({"fc.weight": torch.zeros(32, 96)}),
            "fc.weight has shape (32, 96), its config says (32, 64)",
        ),
        (
            lambda t: t.update({"mask_embedding": torch.zeros(32)}),
            "does not know, first mask_embedding",
        ),
        (
            lambda t: t.update({"layers.0.self_attn.sinks": torch.zeros(6)}),
            "does not know, first layers.0.self_attn.sinks",
        ),
        (
            lambda t: t.update({"layers.2.input_layernorm.weight": torch.zeros(32)}),
            "does not know, first layers.2.input_layernorm.weight",
        ),
    ],
)
def test_wrong_tensors(
    llama: Tiny, tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    assert message in load_error(llama.target, drafter_config(), edit(change), tmp_path)


def test_copies_of_the_targets_tensors_are_ignored(llama: Tiny, tmp_path: Path) -> None:
    extra = {
        "embed_tokens.weight": torch.zeros(VOCAB, 32),
        "lm_head.weight": torch.zeros(VOCAB, 32),
    }
    save(tmp_path, drafter_config(), drafter_tensors(drafter_config()) | extra)
    DFlash.load(tmp_path, llama.target)


def test_broken_files(llama: Tiny, tmp_path: Path) -> None:
    config = drafter_config()
    save(tmp_path, config, drafter_tensors(config))
    weights, text = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole = weights.read_bytes()
    for cut in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        assert f"{weights} is truncated or corrupt" in error_of(tmp_path, llama.target)
    weights.unlink()
    assert f"{tmp_path} has no .safetensors file" in error_of(tmp_path, llama.target)
    weights.write_bytes(whole)
    for broken in ("", "{", json.dumps(config)[:-5]):
        text.write_text(broken)
        assert f"cannot read the drafter's {text}" in error_of(tmp_path, llama.target)
    text.write_bytes(b"\xff\xfe\x00")
    assert f"cannot read the drafter's {text}" in error_of(tmp_path, llama.target)
    text.unlink()
    assert f"cannot read the drafter's {text}" in error_of(tmp_path, llama.target)
    assert "cannot read the drafter's" in error_of(tmp_path / "nowhere", llama.target)


@pytest.mark.parametrize("content", ["[]", "7", '"DFlashDraftModel"'])
def test_config_that_is_no_object(llama: Tiny, tmp_path: Path, content: str) -> None:
    save(tmp_path, drafter_config(), drafter_tensors(drafter_config()))
    (tmp_path / "config.json").write_text(content)
    error_of(tmp_path, llama.target)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": "six"},
        {"dflash_config": [1]},
        {"num_hidden_layers": "2"},
        {"layer_types": [FULL]},
        {"layer_types": [FULL, "strange"]},
        {"hidden_size": None},
        {"dflash_config": {"target_layer_ids": "ab", "mask_token_id": 3}},
    ],
)
def test_config_with_values_of_the_wrong_kind(
    llama: Tiny, tmp_path: Path, changes: dict[str, Any]
) -> None:
    load_error(
        llama.target, drafter_config() | changes, drafter_tensors(drafter_config()), tmp_path
    )


def test_drafter_follows_its_targets_dtype(tmp_path: Path) -> None:
    model = make_model("llama").to(torch.bfloat16)
    config = drafter_config()
    save(tmp_path, config, drafter_tensors(config))
    drafter = DFlash.load(tmp_path, CausalLM.of(model))
    session = Session(drafter.target, drafter, FixedSlope(33))
    list(session.generate([5, 9, 12], 50))
    assert session.drafts.keys.dtype == torch.bfloat16
    assert len(session.tokens) == 53 and session.drafts.keys.shape[-2] == POSITIONS + BLOCK
