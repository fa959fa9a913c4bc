"""Checkpoints as trainers and tools leave them: wrapped names, pointers, broken numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpdraft.drafters.checkpoint import write
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.errors import SharpDraftError
from support.drafters import append, drafter_config, drafter_tensors, propose
from support.families import eagle_config, eagle_tensors, make_pard
from support.tiny import VOCAB, Tiny

Tensors = dict[str, Tensor]
FAMILIES = ("dflash", "eagle3", "pard")


def parts(family: str, tiny: Tiny) -> tuple[dict[str, Any], Tensors]:
    if family == "dflash":
        return drafter_config(), drafter_tensors(drafter_config())
    if family == "eagle3":
        return eagle_config(), eagle_tensors(eagle_config(), tiny.target)
    model = make_pard()
    config = {**model.config.to_dict(), "pard_token": VOCAB - 1}
    return config, {name: t.detach().clone() for name, t in model.state_dict().items()}


def drafts(folder: Path, tiny: Tiny) -> list[int]:
    """What a drafter in a directory drafts behind a text."""
    drafter = load_drafter(folder, tiny.target)
    text, cache = tiny.text[:20], drafter.new_cache(40)
    rng = torch.Generator().manual_seed(2)
    append(drafter, cache, text[:-1], [torch.randn(1, 19, 32, generator=rng) for _ in drafter.taps])
    return propose(drafter, cache, text[-1], 3).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_what_a_model_was_wrapped_in(
    llama: Tiny, tmp_path: Path, family: str, prefix: str
) -> None:
    config, tensors = parts(family, llama)
    write(tmp_path / "plain", config, tensors)
    write(tmp_path / "wrapped", config, {prefix + name: t for name, t in tensors.items()})
    assert drafts(tmp_path / "wrapped", llama) == drafts(tmp_path / "plain", llama)


@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_frequencies_that_old_checkpoints_hold(llama: Tiny, tmp_path: Path, family: str) -> None:
    config, tensors = parts(family, llama)
    right = 1.0 / config.get("rope_theta", 1e4) ** (torch.arange(0, 8, 2).float() / 8)
    name = "layers.0.self_attn.rotary_emb.inv_freq"
    write(tmp_path, config, tensors)
    plain = drafts(tmp_path, llama)
    write(tmp_path, config, tensors | {name: right})
    assert drafts(tmp_path, llama) == plain
    write(tmp_path, config, tensors | {name: right * 1.01})
    with pytest.raises(SharpDraftError, match="other rotary positions"):
        load_drafter(tmp_path, llama.target)


@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_one_tensor_under_two_names(llama: Tiny, tmp_path: Path, family: str) -> None:
    config, tensors = parts(family, llama)
    write(tmp_path, config, tensors | {"model.norm.weight": tensors["norm.weight"].clone()})
    load_drafter(tmp_path, llama.target)
    write(tmp_path, config, tensors | {"model.norm.weight": tensors["norm.weight"] + 1})
    with pytest.raises(SharpDraftError, match=r"two tensors for norm\.weight"):
        load_drafter(tmp_path, llama.target)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_numbers(llama: Tiny, tmp_path: Path, family: str, value: float) -> None:
    config, tensors = parts(family, llama)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name].view(-1)[3] = value
    write(tmp_path, config, tensors)
    with pytest.raises(SharpDraftError, match=r"the drafter.*NaN or infinite"):
        load_drafter(tmp_path, llama.target)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pointer_in_place_of_weights(llama: Tiny, tmp_path: Path, family: str) -> None:
    config, tensors = parts(family, llama)
    write(tmp_path, config, tensors)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(SharpDraftError, match="git lfs pull"):
        load_drafter(tmp_path, llama.target)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_with_a_byte_order_mark(llama: Tiny, tmp_path: Path, family: str) -> None:
    config, tensors = parts(family, llama)
    write(tmp_path, config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")
    load_drafter(tmp_path, llama.target)


PARD_MASKS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "both": (lambda c: c.update(ptd_token_id=3), "says the mask token twice"),
    "a text": (lambda c: c.update(pard_token="<mask>"), "not a token's id"),
    "behind the end": (lambda c: c.update(pard_token=VOCAB), f"pard_token is {VOCAB}"),
}


@pytest.mark.parametrize("case", PARD_MASKS)
def test_mask_tokens_of_a_pard(llama: Tiny, tmp_path: Path, case: str) -> None:
    config, tensors = parts("pard", llama)
    write(tmp_path, config, tensors)
    plain = drafts(tmp_path, llama)
    config["ptd_token_id"] = config.pop("pard_token")
    write(tmp_path, config, tensors)
    assert drafts(tmp_path, llama) == plain
    config["pard_token"] = config.pop("ptd_token_id")
    change, message = PARD_MASKS[case]
    change(config)
    write(tmp_path, config, tensors)
    with pytest.raises(SharpDraftError, match=message):
        load_drafter(tmp_path, llama.target)


def test_two_drafts_for_one_token(llama: Tiny, tmp_path: Path) -> None:
    config = eagle_config(draft_vocab_size=40)
    tensors = eagle_tensors(config, llama.target)
    tensors.pop("t2d", None)
    tensors["d2t"] = torch.zeros(40, dtype=torch.long)
    tensors["d2t"][5] = 1
    write(tmp_path, config, tensors)
    with pytest.raises(SharpDraftError, match="maps two of its tokens to one"):
        load_drafter(tmp_path, llama.target)
