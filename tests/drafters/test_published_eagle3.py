"""EAGLE-3 checkpoints as they are published, against a chain written out by its definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpdraft.decode.sampling import Sampler, Sampling
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.method.settings import DraftSettings
from sharpdraft.model.placement import Ragged
from support.dflash import FULL, SLIDING
from support.drafters import append
from support.eagle_plain import Chain
from support.families import DIM, HEADS, KV, SIZE, eagle_config, eagle_tensors
from support.published import (
    CONTEXT,
    DRAFTS,
    LAYOUTS,
    check_says,
    check_writes,
    loaded,
    noted,
    outputs,
    refusal,
    speculators,
    write,
)
from support.tiny import VOCAB, Tiny

ATTENTION = "midlayer.self_attn"
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.5, 3.0, 6.0],
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}


@dataclass
class Case:
    """A checkpoint with SafeAILab's names, in which `named` stands for "midlayer."; and what a
    plain Chain is told of it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    right: dict[str, Any] = field(default_factory=dict)
    named: str = "midlayer."
    layout: str = "one file"

    def check(self, folder: Path, tiny: Tiny) -> Any:
        named = {n.replace("midlayer.", self.named): t for n, t in self.tensors.items()}
        write(folder, self.config, named, self.layout)
        drafter = loaded(folder, tiny.target)
        check_says(drafter, tiny, self.chain().says(tiny))
        return drafter

    def chain(self) -> Chain:
        return Chain(self.tensors, HEADS, KV, DIM, **self.right)


def rows(seed: int, count: int, size: int = SIZE) -> Tensor:
    return 0.35 * torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def case(tiny: Tiny, changes: dict[str, Any], **right: Any) -> Case:
    """SafeAILab's layout with `changes` ("absent" takes a key out)."""
    full = eagle_config(**{k: v for k, v in changes.items() if v != "absent"})
    tensors = eagle_tensors(full, tiny.target)
    return Case({k: v for k, v in full.items() if changes.get(k) != "absent"}, tensors, right)


def biased(tiny: Tiny) -> Case:
    found = case(tiny, {"attention_bias": True})
    for name, count in (("q", HEADS * DIM), ("k", KV * DIM), ("v", KV * DIM), ("o", SIZE)):
        found.tensors[f"{ATTENTION}.{name}_proj.bias"] = rows(count, 1, count)[0]
    return found


def biased_mlp(tiny: Tiny) -> Case:
    found = case(tiny, {"mlp_bias": True})
    for name in ("gate", "up", "down"):
        count = len(found.tensors[f"midlayer.mlp.{name}_proj.weight"])
        found.tensors[f"midlayer.mlp.{name}_proj.bias"] = rows(count, 1, count)[0]
    return found


def own_embedding(tiny: Tiny, **changes: Any) -> Case:
    found = case(tiny, changes)
    found.tensors["embed_tokens.weight"] = rows(5, VOCAB)
    return found


def no_head(tiny: Tiny) -> Case:
    found = case(tiny, {})
    del found.tensors["lm_head.weight"]
    return found


def normed_heads(tiny: Tiny) -> Case:
    """A layer like Qwen3's."""
    found = case(tiny, {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"})
    for seed, name in enumerate("qk"):
        found.tensors[f"{ATTENTION}.{name}_norm.weight"] = 1 + rows(seed, 1, DIM)[0]
    return found


def other_size(tiny: Tiny) -> Case:
    """Wider than its target, with heads of the same sizes."""
    wide = 48
    found = case(tiny, {"hidden_size": wide, "target_hidden_size": SIZE, "head_dim": DIM})
    inner, tensors = found.config["intermediate_size"], found.tensors
    for seed, (name, old) in enumerate(list(tensors.items())):
        if "norm" in name:
            tensors[name] = 1 + rows(seed, 1, wide)[0]
        elif any(f"{part}_proj" in name for part in ("q", "k", "v")):
            tensors[name] = rows(seed, len(old), 2 * wide)
    tensors["fc.weight"] = rows(20, wide, 3 * SIZE)
    tensors[f"{ATTENTION}.o_proj.weight"] = rows(21, wide, HEADS * DIM)
    tensors["midlayer.mlp.gate_proj.weight"] = rows(22, inner, wide)
    tensors["midlayer.mlp.up_proj.weight"] = rows(23, inner, wide)
    tensors["midlayer.mlp.down_proj.weight"] = rows(24, wide, inner)
    tensors["embed_tokens.weight"] = rows(25, VOCAB, wide)
    tensors["lm_head.weight"] = rows(26, VOCAB, wide)
    return found


def nested(tiny: Tiny, changes: dict[str, Any], **outer: Any) -> Case:
    """speculators' layout, which norms before the residual where it does not say."""
    found = case(tiny, changes)
    outside = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_output")
    kept = {k: v for k, v in found.config.items() if k in outside}
    found.config = speculators("eagle3", found.config, {**kept, **outer})
    found.named = "layers.0."
    found.right = {"normed_residual": outer.get("norm_before_residual", True)}
    return found


def as_nvidia_writes(tiny: Tiny) -> Case:
    inner = {
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
        "next_layer_regular": True,
        "parallel_draft_heads_num_layers": None,
        "parallel_draft_step": 1,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
    changes = {"eagle_aux_hidden_state_layer_ids": "absent", "eagle_config": inner}
    return case(tiny, changes, taps=(0, 1, 3))


def norm_before(tiny: Tiny, **changes: Any) -> Case:
    found = case(tiny, {"eagle_config": {"norm_before_fc": True}})
    if changes:
        del found.config["eagle_config"]
        found.config |= changes
    return found


def stored(tiny: Tiny, dtype: torch.dtype) -> Case:
    found = case(tiny, {"draft_vocab_size": 40})
    for name, tensor in found.tensors.items():
        if tensor.is_floating_point():
            found.tensors[name] = tensor.to(dtype)
    return found


WINDOW = {"layer_types": [SLIDING], "sliding_window": 9}
CASES: dict[str, Callable[[Tiny], Case]] = {
    "SafeAILab": lambda t: case(t, {}),
    "reduced vocabulary": lambda t: case(t, {"draft_vocab_size": 40}),
    "SpecForge": lambda t: own_embedding(t, draft_vocab_size=40),
    "named as a Llama": lambda t: own_embedding(t, architectures=["LlamaForCausalLM"]),
    "named as a Qwen3": lambda t: case(t, {"architectures": ["Qwen3ForCausalLM"]}),
    "not named": lambda t: case(t, {"architectures": "absent"}),
    "named by AngelSlim": lambda t: case(
        t, {"architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3"}
    ),
    "no head of its own": no_head,
    "norms of the taps": lambda t: case(t, {"fc_norm": True}),
    "normed states": lambda t: case(t, {"norm_output": True}, normed_state=True),
    "normed residual": lambda t: case(t, {"norm_before_residual": True}, normed_residual=True),
    "norm before fusion, inside": norm_before,
    "norm before fusion, outside": lambda t: norm_before(t, norm_before_fc=True),
    "speculators": lambda t: nested(t, {}, norm_before_residual=False),
    "speculators, silent of the residual": lambda t: nested(t, {}),
    "speculators, reduced vocabulary": lambda t: nested(
        t, {"draft_vocab_size": 40, "fc_norm": True}, norm_before_residual=True
    ),
    "biases": biased,
    "biases of the MLP": biased_mlp,
    "normed heads": normed_heads,
    "neighbours turned": lambda t: case(t, {"is_neox_style": False}, halves=False),
    "half of a head turned": lambda t: case(t, {"partial_rotary_factor": 0.5}, turned=4),
    "scaled logits": lambda t: case(t, {"logit_scale": 0.5}, scale=0.5),
    "longrope": lambda t: case(t, {"rope_scaling": LONG}, rope={"rope_scaling": LONG}),
    "yarn": lambda t: case(t, {"rope_scaling": YARN}, rope={"rope_scaling": YARN}),
    "sliding": lambda t: case(t, WINDOW, window=9),
    "sliding, as Qwen says it": lambda t: case(
        t,
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 0,
        },
        window=9,
    ),
    "a window that is not used": lambda t: case(
        t, {"sliding_window": 9, "use_sliding_window": False, "max_window_layers": 28}
    ),
    "a window of no layer": lambda t: case(t, {"layer_types": [FULL], "sliding_window": 9}),
    "ids inside": as_nvidia_writes,
    "as wide as it likes": other_size,
    "few positions": lambda t: case(t, {"max_position_embeddings": 16}),
    "float16": lambda t: stored(t, torch.float16),
    "bfloat16": lambda t: stored(t, torch.bfloat16),
}


@pytest.mark.parametrize("name", CASES)
def test_says_what_a_plain_chain_says(llama: Tiny, tmp_path: Path, name: str) -> None:
    drafter = CASES[name](llama).check(tmp_path, llama)
    assert drafter.num_drafts == (DRAFTS if "speculators" in name else 5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files(qwen3: Tiny, tmp_path: Path, layout: str) -> None:
    for number, found in enumerate((case(qwen3, {"draft_vocab_size": 40}), own_embedding(qwen3))):
        found.layout = layout
        found.check(tmp_path / str(number), qwen3)


def test_layers_are_assumed_aloud(llama: Tiny, tmp_path: Path) -> None:
    """Nothing says which layers are read: those that everybody takes, 2, n / 2 and n - 3."""
    changes = {"eagle_aux_hidden_state_layer_ids": "absent"}
    found = case(llama, changes, taps=(1, 1, 0))
    write(tmp_path, found.config, found.tensors)
    drafter, notes = noted(lambda: load_drafter(tmp_path, llama.target))
    assert len(notes) == 1 and "outputs of layers 1, 1, 0" in notes[0]
    check_says(drafter, llama, found.chain().says(llama))


def test_ids_said_twice(llama: Tiny, tmp_path: Path) -> None:
    """At top level they name the layer that is read into, inside the layer that is read from."""
    inner = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
    case(llama, {"eagle_config": inner}).check(tmp_path, llama)


@pytest.mark.parametrize("lacks", ["embed_tokens.weight", "lm_head.weight"])
def test_another_size_needs_its_own(llama: Tiny, tmp_path: Path, lacks: str) -> None:
    found = other_size(llama)
    del found.tensors[lacks]
    message = refusal(write(tmp_path, found.config, found.tensors), llama.target)
    assert all(word in message for word in ("hidden size", "48", "32", lacks)), message


def test_the_cases_differ(llama: Tiny) -> None:
    plain = CASES["SafeAILab"](llama).chain().says(llama)
    same = {
        name
        for name, build in CASES.items()
        if torch.equal(build(llama).chain().says(llama), plain)
    }
    assert same == {
        "SafeAILab",
        "named as a Qwen3",
        "not named",
        "named by AngelSlim",
        "no head of its own",  # The head of the others is the target's.
        "speculators",
        "a window that is not used",
        "a window of no layer",
        "few positions",
    }


@pytest.mark.parametrize("name", ["as wide as it likes", "sliding", "neighbours turned"])
def test_writes_what_the_target_writes(llama: Tiny, tmp_path: Path, name: str) -> None:
    built = CASES[name](llama)
    write(tmp_path, built.config, built.tensors)
    check_writes(loaded(tmp_path, llama.target), llama)


def test_what_is_sampled_of_a_reduced_vocabulary(llama: Tiny, tmp_path: Path) -> None:
    """The probabilities are the target's vocabulary's, with nothing where nothing is drafted."""
    found = CASES["reduced vocabulary"](llama)
    write(tmp_path, found.config, found.tensors)
    drafter = loaded(tmp_path, llama.target)
    text = llama.text[:CONTEXT]
    states, cache = outputs(llama.model, text[:-1]), drafter.new_cache(CONTEXT + DRAFTS)
    append(drafter, cache, text[:-1], [states[tap][None] for tap in drafter.taps])
    pick = Sampler(Sampling(temperature=0.8, seed=5)).pick(text, VOCAB)
    anchor, plain = torch.tensor([text[-1]]), [DraftSettings()]
    (draft,) = drafter.propose(Ragged(), [cache], anchor, DRAFTS, plain, [pick])
    assert draft.probabilities is not None and draft.probabilities.shape == (DRAFTS, VOCAB)
    assert set((draft.probabilities > 0).sum(-1).tolist()) == {40}
    right = (found.chain().says(llama, text, 1) / 0.8).softmax(-1)
    torch.testing.assert_close(draft.probabilities[:1].double(), right, rtol=1e-3, atol=1e-5)
