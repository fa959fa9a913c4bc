"""The keys of real configs are all known; others are noted, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpdraft.drafters.registry import load_drafter
from support.dflash import SLIDING
from support.drafters import drafter_config, drafter_tensors
from support.eagle_plain import Chain
from support.families import eagle_config, eagle_tensors, make_pard
from support.published import check_says, loaded, noted, refusal, said, write
from support.published_configs import DFLASH, EAGLE3, PARD
from support.tiny import VOCAB, Tiny
from support.zlab import peer, zlab_says

REDUCED = 40


def weights(family: str, config: dict[str, Any], tiny: Tiny) -> dict[str, Tensor]:
    layer = {**config.get("transformer_layer_config", {}), **config}
    if family == "dflash":
        like = drafter_config(dflash_config={"target_layer_ids": [0, 2], "mask_token_id": 3})
        tensors = drafter_tensors(like | {k: layer[k] for k in like if layer.get(k) is not None})
        if config.get("has_embed_tokens"):
            tensors["embed_tokens.weight"] = torch.ones(VOCAB, 32)
        if config.get("draft_vocab_size"):
            tensors |= _maps() | {"lm_head.weight": tiny.model.lm_head.weight[:REDUCED].detach()}
        return tensors
    if family == "eagle3":
        tensors = eagle_tensors(eagle_config(**{**layer, "draft_vocab_size": REDUCED}), tiny.target)
        tensors["embed_tokens.weight"] = tiny.model.get_input_embeddings().weight.detach()
        return tensors
    kind = config["model_type"]
    tensors = dict(make_pard().state_dict())
    for number in range(2):
        at = f"model.layers.{number}.self_attn"
        if kind == "qwen2":
            sizes = (("q", 32), ("k", 16), ("v", 16))
            tensors |= {f"{at}.{name}_proj.bias": torch.ones(size) for name, size in sizes}
        if kind == "qwen3":
            tensors |= {f"{at}.{name}_norm.weight": torch.ones(8) for name in "qk"}
    return tensors


def _maps() -> dict[str, Tensor]:
    marked = torch.arange(VOCAB) < REDUCED
    return {"d2t": torch.zeros(REDUCED, dtype=torch.long), "t2d": marked}


PUBLISHED = [
    (family, name)
    for family, table in (("dflash", DFLASH), ("eagle3", EAGLE3), ("pard", PARD))
    for name in table
]


@pytest.mark.parametrize(("family", "name"), PUBLISHED)
def test_real_configs_are_read_without_a_word(
    llama: Tiny, tmp_path: Path, family: str, name: str
) -> None:
    config = {"dflash": DFLASH, "eagle3": EAGLE3, "pard": PARD}[family][name]
    write(tmp_path, config, weights(family, config, llama))
    drafter, notes = noted(lambda: load_drafter(tmp_path, llama.target))
    ids = "eagle_aux_hidden_state_layer_ids"
    if family == "eagle3" and ids not in config and ids not in config.get("eagle_config", {}):
        # Which layers are read was not said: that, and nothing else, is.
        assert len(notes) == 1 and ids in notes[0]
    else:
        assert notes == []
    logits, _ = said(drafter, llama)
    reduced = family == "eagle3" or config.get("draft_vocab_size")
    assert set(logits.isfinite().sum(-1).tolist()) == {REDUCED if reduced else VOCAB}
    assert drafter.num_drafts == (7 if family == "pard" else 5)
    windows = [view.window for view in drafter.views]
    assert windows == ([2048, None] if SLIDING in str(config) else [None] * len(windows))


@pytest.mark.parametrize("family", ["dflash", "eagle3", "pard"])
def test_keys_in_no_list_are_noted_once(llama: Tiny, tmp_path: Path, family: str) -> None:
    strange: dict[str, Any] = {"warp_factor": 9, "zeta": {"a": 1}, "absent_anyway": None}
    if family == "dflash":
        config = drafter_config()
        tensors = drafter_tensors(config)
        right = zlab_says(peer(config, tensors), llama)
        config = config | strange
        config["dflash_config"] = config["dflash_config"] | {"inner_secret": True}
    elif family == "eagle3":
        config = eagle_config(**strange, eagle_config={"inner_secret": True})
        tensors = eagle_tensors(config, llama.target)
        right = Chain(tensors).says(llama)
    else:
        model = make_pard()
        config = model.config.to_dict() | strange | {"pard_token": 3, "inner_secret": 1}
        tensors = dict(model.state_dict())
        right = None
    write(tmp_path, config, tensors)
    drafter, notes = noted(lambda: load_drafter(tmp_path, llama.target))
    assert len(notes) == 1
    assert all(name in notes[0] for name in ("warp_factor", "zeta", "inner_secret"))
    assert "absent_anyway" not in notes[0]
    if right is not None:
        check_says(drafter, llama, right)


@pytest.mark.parametrize("key", ["output_multiplier", "final_logit_softcapping"])
@pytest.mark.parametrize("inside", [False, True])
def test_what_zlab_does_to_logits(llama: Tiny, tmp_path: Path, key: str, inside: bool) -> None:
    """It is done, or refused by name."""
    config = drafter_config()
    if inside:
        config["dflash_config"] = config["dflash_config"] | {key: 2.0}
    else:
        config[key] = 2.0
    tensors = drafter_tensors(config)
    write(tmp_path, config, tensors)
    right = zlab_says(peer(config, tensors), llama)
    right = 2 * right if key == "output_multiplier" else 2 * (right / 2).tanh()
    if message := refusal(tmp_path, llama.target):
        assert key in message
    else:
        check_says(loaded(tmp_path, llama.target), llama, right)
