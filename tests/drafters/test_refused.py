"""Checkpoints that are not run are refused, each with words that name the one thing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpdraft.drafters.registry import load_drafter
from sharpdraft.errors import SharpDraftError
from sharpdraft.hub.targets import load_target
from support.checkpoints import Checkpoints
from support.drafters import drafter_config, drafter_tensors
from support.eagle_plain import Chain
from support.families import eagle_config, eagle_tensors, make_pard
from support.others import OTHERS, language_model
from support.published import check_says, noted, refusal, write
from support.tiny import VOCAB, Tiny

Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


def checkpoint(family: str, tiny: Tiny) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if family == "dflash":
        return drafter_config(), drafter_tensors(drafter_config())
    if family == "eagle3":
        return eagle_config(), eagle_tensors(eagle_config(), tiny.target)
    model = make_pard()
    return model.config.to_dict() | {"pard_token": 3}, dict(model.state_dict())


def says(**changes: Any) -> Change:
    return lambda config, tensors: config.update(changes)


def inside(name: str, **changes: Any) -> Change:
    return lambda config, tensors: config.update({name: config.get(name, {}) | changes})


def has(name: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.update({name: torch.ones(shape)})


def reduced(contradicts: bool) -> Change:
    """A vocabulary of 40 whose maps contradict each other, or which maps out of the target's."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["draft_vocab_size"] = 40
        tensors["lm_head.weight"] = torch.ones(40, 32)
        tensors["d2t"] = torch.full((40,), 0 if contradicts else VOCAB - 39)
        if contradicts:
            tensors["t2d"] = torch.arange(VOCAB) >= VOCAB - 40

    return change


def shapeless(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    reduced(True)(config, tensors)
    tensors["t2d"] = torch.tensor(1.0)


DYNAMIC = {"rope_type": "dynamic", "factor": 8.0}
EVERY = {
    "gelu": (says(hidden_act="gelu"), ["gelu"]),
    "quantised": (says(quantization_config={"quant_method": "fp8"}), ["quanti"]),
    "dynamic rope": (says(rope_scaling=DYNAMIC, rope_parameters=None), ["dynamic"]),
    "old dynamic rope": (
        says(rope_scaling={"type": "dynamic", "factor": 8.0}, rope_parameters=None),
        ["dynamic"],
    ),
    "mrope": (
        says(rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]}, rope_parameters=None),
        ["mrope"],
    ),
}
OTHER_LAYERS = says(model_type="gemma2"), ["gemma2"]
DFLASH = EVERY | {
    "layers of another kind": OTHER_LAYERS,
    "no states": (inside("dflash_config", use_aux_hidden_state=False), ["use_aux_hidden_state"]),
    "from the anchor": (inside("dflash_config", sample_from_anchor=True), ["sample_from_anchor"]),
    "from the anchor, outside": (says(sample_from_anchor=True), ["sample_from_anchor"]),
    "sinks": (inside("dflash_config", attention_sink_bias=True), ["attention_sink_bias"]),
    "sinks, outside": (says(attention_sink_bias=True), ["attention_sink_bias"]),
    "sinks, MiMo's": (says(add_swa_attention_sink_bias=True), ["add_swa_attention_sink_bias"]),
    "learned sinks": (has("layers.0.self_attn.sinks", 6), ["layers.0.self_attn.sinks"]),
    "mask embedding": (has("mask_embedding", 32), ["mask_embedding"]),
    "gates": (has("layers.0.self_attn.g_proj.weight", 6, 32), ["g_proj"]),
    "maps contradict": (reduced(True), ["t2d", "d2t"]),
    "a map of no shape": (shapeless, ["t2d"]),
    "maps lead out": (reduced(False), ["d2t", "outside"]),
    "two lists": (says(target_layer_ids=[1, 2]), ["target_layer_ids", "[1, 2]", "[0, 2]"]),
    "two lists, EAGLE's name": (
        says(eagle_aux_hidden_state_layer_ids=[2, 3]),
        ["target_layer_ids", "eagle_aux_hidden_state_layer_ids"],
    ),
    "two masks": (says(mask_token_id=4), ["mask_token_id", "4", "3"]),
    "target of another size": (says(target_hidden_size=64), ["target_hidden_size", "64", "32"]),
    "other depth": (says(num_target_layers=36), ["36", "4"]),
}
EAGLE3 = EVERY | {
    "layers of another kind": OTHER_LAYERS,
    "no states": (inside("eagle_config", use_aux_hidden_state=False), ["use_aux_hidden_state"]),
    "no last norm": (inside("eagle_config", use_last_layernorm=False), ["use_last_layernorm"]),
    "no first norm": (
        inside("eagle_config", use_input_layernorm_in_first_layer=False),
        ["use_input_layernorm_in_first_layer"],
    ),
    "many at once": (inside("eagle_config", parallel_draft_step=4), ["parallel_draft_step"]),
    "two layers": (says(num_hidden_layers=2), ["2 layers"]),
    "learned sinks": (has("midlayer.self_attn.sinks", 4), ["self_attn.sinks"]),
    "maps contradict": (reduced(True), ["t2d", "d2t"]),
    "a map of no shape": (shapeless, ["t2d"]),
    "maps lead out": (reduced(False), ["d2t", "outside"]),
    "two lists": (
        inside("eagle_config", eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        ["eagle_aux_hidden_state_layer_ids"],
    ),
    "target of another size": (says(target_hidden_size=64), ["target_hidden_size", "64", "32"]),
}
PARD = EVERY | {
    "mask outside": (says(pard_token=VOCAB), ["pard_token", "64"]),
    "no mask": (says(pard_token=-1), ["pard_token", "-1"]),
    "mask is no token": (says(pard_token="<mask>"), ["pard_token"]),
    "learned sinks": (has("model.layers.0.self_attn.sinks", 4), ["self_attn.sinks"]),
    "layers of another kind": OTHER_LAYERS,
    "another model": (says(model_type="gpt2", architectures=["GPT2LMHeadModel"]), ["gpt2"]),
}
CASES = [
    (family, name, *found)
    for family, table in (("dflash", DFLASH), ("eagle3", EAGLE3), ("pard", PARD))
    for name, found in table.items()
]


@pytest.mark.parametrize(
    ("family", "name", "change", "words"), CASES, ids=[f"{c[0]}, {c[1]}" for c in CASES]
)
def test_what_is_not_computed(
    llama: Tiny, tmp_path: Path, family: str, name: str, change: Change, words: list[str]
) -> None:
    config, tensors = checkpoint(family, llama)
    assert refusal(write(tmp_path / "whole", config, tensors), llama.target) == ""
    change(config, tensors)
    message = refusal(write(tmp_path / "changed", config, tensors), llama.target)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_called_by_their_names(llama: Tiny, tmp_path: Path, name: str) -> None:
    called, make = OTHERS[name]
    config, tensors = make()
    for layout in ("one file", "pickled"):
        message = refusal(write(tmp_path / layout, config, tensors, layout), llama.target)
        assert called.lower() in message.lower(), message


def test_a_mask_embedding_in_a_file_of_its_own(llama: Tiny, tmp_path: Path) -> None:
    write(tmp_path, *checkpoint("dflash", llama))
    torch.save({"embedding": torch.ones(32), "mask_token_id": 3}, tmp_path / "mask_embedding.pt")
    assert "mask_embedding.pt" in refusal(tmp_path, llama.target)


def test_language_models(llama: Tiny, saved: Checkpoints, tmp_path: Path) -> None:
    """One without a mask token, and the target itself."""
    message = refusal(write(tmp_path, *language_model()), llama.target)
    assert "pard_token" in message and "LlamaForCausalLM" in message
    target, _ = load_target(str(saved.target), device="cpu")
    assert "pard_token" in refusal(saved.target, target)


def test_directories_that_hold_no_checkpoint(llama: Tiny, tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path, llama.target)
    assert "config.json" in refusal(tmp_path / "nowhere", llama.target)
    for family in ("dflash", "eagle3", "pard"):
        folder = write(tmp_path / family, *checkpoint(family, llama))
        (folder / "model.safetensors").unlink()
        assert "safetensors" in refusal(folder, llama.target)


def test_families_that_contradict(llama: Tiny, tmp_path: Path) -> None:
    """Names of one, weights of another: both are said, and the user decides."""
    config, tensors = checkpoint("eagle3", llama)
    write(tmp_path, config | {"architectures": ["DFlashDraftModel"]}, tensors)
    message = refusal(tmp_path, llama.target)
    assert all(word in message for word in ("DFlash", "EAGLE-3", "midlayer", "--family")), message
    drafter, _ = noted(lambda: load_drafter(tmp_path, llama.target, family="eagle3"))
    check_says(drafter, llama, Chain(tensors).says(llama))
    assert refusal(tmp_path, llama.target, "dflash")
    with pytest.raises(SharpDraftError, match="dflash, eagle3, pard"):
        load_drafter(tmp_path, llama.target, family="medusa")


def test_a_family_is_decided_where_nothing_says_it(llama: Tiny, tmp_path: Path) -> None:
    config, tensors = checkpoint("dflash", llama)
    del config["architectures"], config["dflash_config"]
    config |= {"target_layer_ids": [0, 2], "mask_token_id": 3}
    write(tmp_path, config, tensors)
    drafter, _ = noted(lambda: load_drafter(tmp_path, llama.target, family="dflash"))
    assert drafter.taps == (0, 2)


def test_another_tokenizer(saved: Checkpoints, tmp_path: Path) -> None:
    """Ids that both have and that mean other words: told by what the tokenizers say, whatever the
    sizes are."""
    target, _ = load_target(str(saved.target), device="cpu")
    for vocab in (VOCAB, VOCAB + 8):
        folder = tmp_path / str(vocab)
        model = make_pard(vocab=vocab)
        model.config.pard_token = 3
        model.save_pretrained(folder)
        shutil.copy(saved.target / "tokenizer.json", folder)
        assert refusal(folder, target) == ""
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        words = tokenizer["model"]["vocab"]
        words["w20"], words["w21"] = words["w21"], words["w20"]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        message = refusal(folder, target)
        assert "tokenizer" in message and "w20" in message, message
        assert "belongs to another target" not in message


def test_words_that_a_drafter_lacks(saved: Checkpoints, tmp_path: Path) -> None:
    """A smaller vocabulary that leaves out more than padding."""
    target, _ = load_target(str(saved.target), device="cpu")
    model = make_pard(vocab=50)
    model.config.pard_token = 3
    model.save_pretrained(tmp_path)
    message = refusal(tmp_path, target)
    assert "50" in message and "64" in message
