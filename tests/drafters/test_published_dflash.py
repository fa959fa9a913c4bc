"""DFlash checkpoints as they are published, against z-lab's own implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpdraft.drafters.registry import load_drafter
from support.dflash import FULL, SLIDING, WINDOW
from support.drafters import drafter_config, drafter_tensors
from support.published import (
    LAYOUTS,
    check_says,
    check_writes,
    loaded,
    noted,
    refusal,
    speculators,
    write,
)
from support.tiny import BLOCK, PROMPT, VOCAB, Tiny
from support.zlab import peer, zlab_says

pytest.importorskip("dflash")

INNER = {"target_layer_ids": [0, 2], "mask_token_id": 3}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.5, 3.0, 6.0],
    "original_max_position_embeddings": 16,
}
NVIDIA = {
    "attention_sink_bias": False,
    "dflash_query_causal": False,
    "draft_vocab_size": None,
    "dspark_fixup_head_type": None,
    "dspark_markov_rank": None,
    "eagle_aux_hidden_state_layer_ids": [1, 3],
    "has_embed_tokens": False,
    "has_lm_head": False,
    "mask_token_id": 3,
    "num_aux_layers": 2,
    "pard_token": 3,
    "sample_from_anchor": False,
    "target_layer_ids": [0, 2],
    "train_embed_tokens": False,
}


@dataclass
class Case:
    """A checkpoint: `config` and `tensors` under published names; and its meaning, as z-lab's
    config (`right`), what else z-lab's module is told (`turned`, `halves`), and what is around it
    (`around`: embedding, head, token_of, scale)."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    right: dict[str, Any]
    turned: int | None = None
    halves: bool = True
    around: dict[str, Any] = field(default_factory=dict)
    layout: str = "one file"
    extra: dict[str, Tensor] = field(default_factory=dict)

    def check(self, folder: Path, tiny: Tiny, quiet: bool = True) -> Any:
        write(folder, self.config, self.tensors | self.extra, self.layout)
        drafter, notes = noted(lambda: load_drafter(folder, tiny.target))
        assert not (quiet and notes)
        right = peer(self.right, self.tensors, self.turned, self.halves)
        check_says(drafter, tiny, zlab_says(right, tiny, **self.around))
        return drafter


def case(changes: dict[str, Any], right: dict[str, Any] | None = None, **how: Any) -> Case:
    """changes: to the config of z-lab's layout; right: those that z-lab's module needs to mean the
    same, if they are not the same."""
    meant = drafter_config(**(changes if right is None else right))
    tensors = drafter_tensors(meant)
    if meant.get("attention_bias"):
        tensors |= biases(tensors)
    config = {k: v for k, v in drafter_config(**changes).items() if v != "absent"}
    return Case(config, tensors, meant, **how)


def rows(seed: int, count: int, size: int = 32) -> Tensor:
    return 0.4 * torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace(".weight", ".bias"): rows(len(name), 1, len(tensor))[0]
        for name, tensor in tensors.items()
        if "_proj.weight" in name and "self_attn" in name
    }


def own(embedding: int = 0, head: int = 0, changes: dict[str, Any] | None = None) -> Case:
    """With so many rows of its own."""
    found = case(changes or {}, {})
    if embedding:
        found.extra["embed_tokens.weight"] = found.around["embedding"] = rows(5, embedding)
    if head:
        found.extra["lm_head.weight"] = rows(6, head)
        found.around["head"] = found.extra["lm_head.weight"][:VOCAB]
    return found


def nested(reduced: int = 0, **changes: Any) -> Case:
    """speculators' layout."""
    found = case({})
    outer = {
        "aux_hidden_state_layer_ids": [0, 2],
        "block_size": BLOCK,
        "draft_vocab_size": reduced or VOCAB,
        "mask_token_id": 3,
    }
    if reduced:
        kept = torch.arange(VOCAB)[3::2][:reduced]
        found.extra = {
            "embed_tokens.weight": rows(5, VOCAB),
            "lm_head.weight": rows(6, reduced),
            "d2t": kept - torch.arange(reduced),
            "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True),
        }
        embedding, head = found.extra["embed_tokens.weight"], found.extra["lm_head.weight"]
        found.around = {"embedding": embedding, "head": head, "token_of": kept}
    found.config = speculators("dflash", found.config, outer, **changes)
    return found


def defaults_left_out() -> Case:
    """As speculators writes it: of the layers' keys only those that are no default."""
    found = nested()
    inner = found.config["transformer_layer_config"]
    for key in ("rms_norm_eps", "tie_word_embeddings"):
        del inner[key]
    return found


def other_size() -> Case:
    """Wider than its target."""
    found = case({"hidden_size": 48, "target_hidden_size": 32}, {"hidden_size": 48})
    found.tensors["fc.weight"] = rows(7, 48, 64)
    found.extra = {
        "embed_tokens.weight": rows(5, VOCAB, 48),
        "lm_head.weight": rows(6, VOCAB, 48),
    }
    embedding, head = found.extra.values()
    found.around = {"embedding": embedding, "head": head}
    return found


def stored(dtype: torch.dtype) -> Case:
    found = case({"dtype": str(dtype).removeprefix("torch.")}, {})
    found.tensors = {name: tensor.to(dtype) for name, tensor in found.tensors.items()}
    return found


def narrow(**changes: Any) -> Case:
    """Windows: `dflash` is z-lab's inner config."""
    inner, right = changes.pop("dflash", {}), changes.pop("right", None)
    changes["dflash_config"] = INNER | inner
    return case(changes, right)


CASES: dict[str, Callable[[], Case]] = {
    "as z-lab publishes it": lambda: case({}),
    "with what NVIDIA adds": lambda: case(
        {**NVIDIA, "rope_parameters": {**YARN, "rope_theta": 10_000}, "rope_theta": 10_000},
        {"rope_parameters": {**YARN, "rope_theta": 10_000}},
    ),
    "by AngelSlim's name": lambda: case({"architectures": ["QwenDFlashDraftModel"]}),
    "without a name": lambda: case({"architectures": None}, {}),
    "own embedding": lambda: own(VOCAB, changes={"has_embed_tokens": True}),
    "own head": lambda: own(0, VOCAB),
    "own embedding and head": lambda: own(VOCAB, VOCAB),
    "tied in name only": lambda: case({"tie_word_embeddings": True}),
    "speculators": nested,
    "speculators, reduced vocabulary": lambda: nested(24),
    "speculators, z-lab's name": lambda: nested(architectures=["DFlashDraftModel"]),
    "speculators, defaults left out": defaults_left_out,
    "block size inside alone": lambda: case(
        {"block_size": "absent", "dflash_config": {**INNER, "block_size": BLOCK}}, {}
    ),
    "number of target layers not said": lambda: case({"num_target_layers": "absent"}, {}),
    "ids twice": lambda: case({"target_layer_ids": [0, 2], "mask_token_id": 3}, {}),
    "scaled logits": lambda: case({"logit_scale": 0.5}, {}, around={"scale": 0.5}),
    "scaled embeddings": lambda: case({"input_embedding_scale": 2.5}, {}),
    "neighbours turned": lambda: case({"is_neox_style": False}, {}, halves=False),
    "half of a head turned": lambda: case({"partial_rotary_factor": 0.5}, {}, turned=4),
    "half of a head turned, said inside": lambda: case(
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, {}, turned=4
    ),
    "neighbours of a half turned": lambda: case(
        {"partial_rotary_factor": 0.5, "is_neox_style": False}, {}, turned=4, halves=False
    ),
    "biases": lambda: case({"attention_bias": True}),
    "yarn, as it was written": lambda: case({"rope_scaling": YARN, "rope_theta": 1e6}),
    "yarn, not truncated": lambda: case({"rope_scaling": {**YARN, "truncate": False}}),
    "llama3": lambda: case({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "linear": lambda: case({"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "longrope": lambda: case({"rope_scaling": LONG}),
    "rope null": lambda: case({"rope_scaling": None, "rope_theta": 1_000_000}),
    "sliding": lambda: case({"layer_types": [SLIDING, FULL], **WINDOW}),
    "sliding, from a layer on": lambda: case({**WINDOW, "max_window_layers": 1}),
    "sliding, not causal": lambda: case(
        {"layer_types": [FULL, SLIDING], **WINDOW, "sliding_window": 4, "is_causal": False}
    ),
    "not sliding, though there is a window": lambda: case(
        {"sliding_window": 8, "use_sliding_window": False, "layer_types": [FULL, FULL]}
    ),
    "causal": lambda: narrow(dflash={"causal": True}, right={"is_causal": True}),
    "windows of all layers": lambda: narrow(
        dflash={"use_swa": True, "swa_window_size": 9},
        right={"layer_types": [SLIDING] * 2, **WINDOW, "sliding_window": 9, "is_causal": False},
    ),
    "a window for each sliding layer": lambda: narrow(
        dflash={"swa_window_size": 9},
        layer_types=[SLIDING, FULL],
        **WINDOW,
        right={"layer_types": [SLIDING, FULL], **WINDOW, "sliding_window": 9},
    ),
    "speculators, windows outside": lambda: _windows_outside(),
    "speculators, windows not causal": lambda: _windows_outside(True),
    "as wide as it likes": other_size,
    "float16": lambda: stored(torch.float16),
    "bfloat16": lambda: stored(torch.bfloat16),
}


def _windows_outside(free: bool = False) -> Case:
    """Beside what is nested, and before it. free: whether a block's tokens see those behind."""
    found = nested()
    says = {"layer_types": [SLIDING, FULL], **WINDOW, "sliding_window": 4}
    found.config["transformer_layer_config"] |= {"sliding_window": None}
    found.config |= {**says, "sliding_window_non_causal": free}
    found.right |= says | ({"is_causal": False} if free else {})
    return found


@pytest.mark.parametrize("name", CASES)
def test_says_what_zlab_says(llama: Tiny, tmp_path: Path, name: str) -> None:
    built = CASES[name]()
    if name == "scaled embeddings":
        built.around["embedding"] = 2.5 * llama.model.get_input_embeddings().weight.detach()
    drafter = built.check(tmp_path, llama)
    assert drafter.max_drafts == BLOCK - 1
    assert drafter.num_drafts == (4 if "speculators" in name else BLOCK - 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files(qwen3: Tiny, tmp_path: Path, layout: str) -> None:
    for found in (case({}), own(VOCAB, VOCAB), nested(24)):
        found.layout = layout
        found.check(tmp_path / f"{len(found.extra)}", qwen3)


@pytest.mark.parametrize(
    "built",
    [
        lambda: case({"vocab_size": 96}, {}),
        lambda: own(70, 70, {"vocab_size": 70}),
        lambda: own(70, 0, {"vocab_size": 70}),
        lambda: own(60, 0, {"vocab_size": 60}),
    ],
)
def test_padding_of_the_vocabulary(llama: Tiny, tmp_path: Path, built: Callable[[], Case]) -> None:
    """Rows behind the target's vocabulary are never drafted; a smaller one is padded by the
    target."""
    found = built()
    if found.around and len(found.around["embedding"]) < VOCAB:
        assert max(llama.text[:PROMPT]) < VOCAB
        lacks = found.around["embedding"]
        found.around["embedding"] = torch.cat((lacks, lacks[-1:].expand(VOCAB - len(lacks), -1)))
    found.check(tmp_path, llama, quiet=False)


def test_a_mask_token_behind_the_targets_vocabulary(llama: Tiny, tmp_path: Path) -> None:
    """With an embedding of its own, of more rows than the target's."""
    found = own(70, 70, {"vocab_size": 70, "dflash_config": INNER | {"mask_token_id": 66}})
    found.right["dflash_config"] = INNER | {"mask_token_id": 66}
    found.check(tmp_path, llama, quiet=False)


def test_leftovers_of_training_are_not_read(llama: Tiny, tmp_path: Path) -> None:
    found = nested()
    found.extra = {
        "verifier_lm_head.weight": rows(1, VOCAB),
        "verifier_norm.weight": rows(2, 1)[0],
    }
    found.check(tmp_path, llama)


@pytest.mark.parametrize("lacks", ["embed_tokens.weight", "lm_head.weight"])
def test_another_size_needs_its_own(llama: Tiny, tmp_path: Path, lacks: str) -> None:
    found = other_size()
    del found.extra[lacks]
    message = refusal(write(tmp_path, found.config, found.tensors | found.extra), llama.target)
    assert all(word in message for word in ("hidden size", "48", "32", lacks)), message


def test_the_cases_differ(llama: Tiny, tmp_path: Path) -> None:
    """What each case is about changes what is drafted: else nothing is shown above."""
    plain = zlab_says(peer(drafter_config(), drafter_tensors(drafter_config())), llama)
    same = set()
    for name, build in CASES.items():
        built = build()
        right = peer(built.right, built.tensors, built.turned, built.halves)
        if torch.equal(zlab_says(right, llama, **built.around), plain):
            same.add(name)
    assert same == {
        "as z-lab publishes it",
        "by AngelSlim's name",
        "without a name",
        "tied in name only",
        "speculators",
        "speculators, z-lab's name",
        "speculators, defaults left out",
        "block size inside alone",
        "number of target layers not said",
        "ids twice",
        "scaled embeddings",  # scaled where the embedding is known
        "not sliding, though there is a window",
    }


@pytest.mark.parametrize(
    "name",
    ["speculators, reduced vocabulary", "neighbours of a half turned", "as wide as it likes"],
)
def test_writes_what_the_target_writes(llama: Tiny, tmp_path: Path, name: str) -> None:
    built = CASES[name]()
    write(tmp_path, built.config, built.tensors | built.extra)
    check_writes(loaded(tmp_path, llama.target), llama)
