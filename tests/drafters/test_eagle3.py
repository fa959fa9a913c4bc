"""EAGLE-3 against its definition run plainly with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from sharpdraft import FixedSlope, SharpDraftError, scale_queries
from sharpdraft.decode.session import Session
from sharpdraft.drafters.eagle3 import Eagle3
from sharpdraft.drafters.eagle3 import save as save_eagle3
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.method.scale import Policy
from support.drafters import propose
from support.families import DIM, SIZE, VARIANTS, eagle_config, eagle_tensors
from support.sessions import settings_of
from support.tiny import PROMPT, VOCAB, Tiny

LOW = FixedSlope(9, slope=0.7, top_k=4, max_scale=8.0)


def plain_chain(
    config: dict[str, Any],
    w: dict[str, Tensor],
    tiny: Tiny,
    text: list[int],
    count: int,
    policy: Policy | None,
) -> list[int]:
    """EAGLE-3 by its definition, with nothing cached: the whole row sequence anew for every
    draft."""
    eps, size = config["rms_norm_eps"], (SIZE,)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name], eps)

    with torch.inference_mode():
        states = tiny.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        taps = [states[i] for i in config["eagle_aux_hidden_state_layer_ids"]]
        if config.get("fc_norm"):
            taps = [
                F.rms_norm(tap, size, w[f"fc_norm.{i}.weight"], eps) for i, tap in enumerate(taps)
            ]
        fused = torch.cat(taps, -1)
        if "input_norm.weight" in w:
            fused = norm(fused, "input_norm.weight")
        hidden = (fused @ w["fc.weight"].T)[0]
        tokens = list(text[1:])
        rotary = LlamaRotaryEmbedding(
            LlamaConfig(**{k: v for k, v in config.items() if k != "architectures"})
        )
        drafts: list[int] = []
        while len(drafts) < count:
            n = len(tokens)
            normed = norm(hidden, "midlayer.hidden_norm.weight")
            embedded = norm(tiny.target.embedding[tokens], "midlayer.input_layernorm.weight")
            row = torch.cat((embedded, normed), -1)
            q, k, v = (
                (row @ w[f"midlayer.self_attn.{p}_proj.weight"].T)
                .view(1, n, -1, DIM)
                .transpose(1, 2)
                for p in "qkv"
            )
            q, k = apply_rotary_pos_emb(q, k, *rotary(hidden, torch.arange(n)[None]))
            if policy is not None:
                q = scale_queries(q, policy.gain(torch.arange(1, n + 1))[None, None])
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(n, -1) @ w["midlayer.self_attn.o_proj.weight"].T
            out = mixed + (normed if config.get("norm_before_residual") else hidden)
            x = norm(out, "midlayer.post_attention_layernorm.weight")
            gate, up = (x @ w[f"midlayer.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            out = out + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
            final = norm(out, "norm.weight")
            draft = int((final[-1] @ w["lm_head.weight"].T).argmax())
            draft += int(w["d2t"][draft]) if "d2t" in w else 0
            drafts.append(draft)
            tokens.append(draft)
            hidden = torch.cat((hidden, (final if config.get("norm_output") else out)[-1:]))
    return drafts


@pytest.mark.parametrize("policy", [None, LOW], ids=["frozen", "scaled"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle_drafts_what_its_definition_drafts(
    llama: Tiny, variant: str, policy: Policy | None
) -> None:
    config = eagle_config(**VARIANTS[variant])
    tensors = eagle_tensors(config, llama.target)
    session = Session(llama.target, Eagle3(config, tensors, llama.target))
    varied = set()
    for length in (2, 3, 20, 60, 61):
        session.rewind(0)
        session.read(llama.text[:length])
        session.rewind(length)
        session.drafts.length = length - 1
        drafts = propose(
            session.drafter, session.drafts, llama.text[length - 1], 4, policy
        ).tolist()
        assert drafts == plain_chain(config, tensors, llama, llama.text[:length], 4, policy)
        varied.add(tuple(drafts))
    assert len(varied) > 2


def write_eagle(
    folder: Path, layout: str, config: dict[str, Any], tensors: dict[str, Tensor]
) -> Path:
    folder.mkdir()
    if layout == "safeailab":
        save_eagle3(folder, config, tensors)
    elif layout == "pytorch_model.bin":
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "config.json").write_text(json.dumps(config))
    else:
        named = {k.replace("midlayer.", "layers.0."): v.contiguous() for k, v in tensors.items()}
        save_file(named, str(folder / "model.safetensors"))
        ours = (
            "architectures",
            "eagle_aux_hidden_state_layer_ids",
            "draft_vocab_size",
            "fc_norm",
            "norm_output",
        )
        outer = {k: v for k, v in config.items() if k in ours} | {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "norm_before_residual": False,
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
            "transformer_layer_config": {k: v for k, v in config.items() if k not in ours},
        }
        (folder / "config.json").write_text(json.dumps(outer))
    return folder


@pytest.mark.parametrize("layout", ["safeailab", "pytorch_model.bin", "speculators"])
def test_eagle_layouts(llama: Tiny, tmp_path: Path, layout: str) -> None:
    config = eagle_config(draft_vocab_size=40, fc_norm=True)
    tensors = eagle_tensors(config, llama.target)
    loaded = load_drafter(write_eagle(tmp_path / "drafter", layout, config, tensors), llama.target)
    assert isinstance(loaded, Eagle3) and loaded.taps == (0, 1, 2)
    assert loaded.num_drafts == (3 if layout == "speculators" else 5)
    for drafter in (loaded, Eagle3(config, tensors, llama.target)):
        session = Session(llama.target, drafter, settings_of(drafts=3))
        rounds = list(session.generate(llama.text[:PROMPT], 40))
        if drafter is loaded:
            expected = rounds
    assert [r.tokens for r in rounds] == [r.tokens for r in expected]


EAGLE_ERRORS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = {
    "hidden size": (lambda c, t: c.update(hidden_size=64), "hidden size is 64"),
    "layers read": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]),
        "outputs of layers",
    ),
    "embedding read": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
        "reads the target's embeddings",
    ),
    "two layers": (lambda c, t: c.update(num_hidden_layers=2), "has 2 layers"),
    "lacking": (
        lambda c, t: t.pop("midlayer.hidden_norm.weight"),
        "lacks 1 tensors, first layers.0.hidden_norm",
    ),
    "shape": (lambda c, t: t.update({"fc.weight": torch.ones(SIZE, SIZE)}), "fc.weight has shape"),
    "unknown": (
        lambda c, t: t.update({"midlayer.self_attn.sinks": torch.ones(4)}),
        "does not know, first",
    ),
    "map": (
        lambda c, t: (c.update(draft_vocab_size=VOCAB - 1), t.update(_map())),
        "outside the target's vocabulary",
    ),
    "no map": (lambda c, t: c.update(draft_vocab_size=VOCAB - 1), "has no d2t"),
    "nonsense": (
        lambda c, t: c.update(num_attention_heads="many"),
        "not one of an EAGLE-3 checkpoint",
    ),
}


def _map() -> dict[str, Tensor]:
    return {"d2t": torch.full((VOCAB - 1,), 7), "lm_head.weight": torch.ones(VOCAB - 1, SIZE)}


@pytest.mark.parametrize("error", EAGLE_ERRORS)
def test_eagle_checkpoints_that_do_not_fit(llama: Tiny, error: str) -> None:
    change, message = EAGLE_ERRORS[error]
    config = eagle_config()
    tensors = eagle_tensors(config, llama.target)
    change(config, tensors)
    with pytest.raises(SharpDraftError, match=message):
        Eagle3(config, tensors, llama.target)
