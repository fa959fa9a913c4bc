"""Tiny targets that every test can afford.

A random drafter next to never guesses right. These targets prefer a handful of tokens, so that a
random drafter on the same head guesses every number of tokens right now and then; where more is
needed, `Oracle` guesses as told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from sharpdraft.model.causal_lm import CausalLM

VOCAB = 64
POSITIONS = 256
PROMPT = 20
BLOCK = 6


@dataclass(frozen=True)
class Tiny:
    """A random target, and a text of which all behind the first PROMPT tokens is its greedy choice.

    Any `text[:n]` with n >= PROMPT is thus a prompt whose answer is `text[n:]`.
    """

    model: Any
    target: CausalLM
    text: list[int]


def make_model(family: str, **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | changes
    torch.manual_seed(0 if family == "llama" else 1)
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if family == "llama"
        else Qwen3ForCausalLM(Qwen3Config(**sizes))
    )
    preferred = 5 if family == "llama" else 8
    with torch.no_grad():
        model.lm_head.weight[:10] *= 0.1
        model.lm_head.weight[10 + preferred :] *= 0.1
        model.lm_head.weight[10] *= 2
    return model.eval()


def continuation(model: Any, tokens: Sequence[int], count: int, **options: Any) -> list[int]:
    """What transformers writes greedily behind `tokens`."""
    ids = torch.tensor([list(tokens)])
    with torch.inference_mode():
        # Without the mask, transformers would guess one from the padding token, which may well be
        # in `tokens`.
        mask = torch.ones_like(ids)
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
            **options,
        )
    return out[0, len(tokens) :].tolist()


def make_tiny(family: str) -> Tiny:
    model = make_model(family)
    seed = (
        4 if family == "llama" else 6
    )  # Of those tried, what makes for varied texts and accepted lengths.
    prompt = torch.randint(
        0, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    text = prompt + continuation(model, prompt, 180)
    with torch.inference_mode():
        top = model(torch.tensor([text])).logits[0, PROMPT:].topk(2).values
    # Differences in the order of additions must not be able to change the text.
    assert float((top[:, 0] - top[:, 1]).min()) > 1e-3
    return Tiny(model, CausalLM.of(model), text)
