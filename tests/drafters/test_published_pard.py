"""PARD checkpoints as they are published, against transformers' own models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sharpdraft.decode.sampling import Sampler, Sampling
from sharpdraft.decode.session import Session
from sharpdraft.drafters.registry import load_drafter
from sharpdraft.method.settings import DraftSettings
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.placement import Ragged
from support.drafters import append
from support.published import (
    CONTEXT,
    DRAFTS,
    LAYOUTS,
    check_says,
    loaded,
    noted,
    over_target,
    said,
    write,
)
from support.tiny import POSITIONS, PROMPT, VOCAB, Tiny

MASK = 7
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def draft_lm(kind: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "pard_token": MASK,
        "spd_type": "pard",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "qwen3":
        sizes["head_dim"] = 8
    config, model = KINDS[kind]
    made = model(config(**sizes | changes)).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() == 1:
                shift = 0.2 * torch.randn(weight.shape)
                weight.copy_(shift if name.endswith("bias") else 1 + shift)
    return made


def says(model: Any, text: Sequence[int], count: int = DRAFTS) -> Tensor:
    """Logits of the anchor's row and of the masks' behind it, for tokens that both have."""
    with torch.inference_mode():
        ids = torch.tensor([[*text] + [MASK] * (count - 1)])
        logits: Tensor = model(ids).logits[0, -count:, :VOCAB]
    return over_target(logits)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_amd_publishes_it(llama: Tiny, tmp_path: Path, kind: str, tied: bool) -> None:
    rope = {"rope_parameters": LLAMA3} if kind == "llama" else {}
    model = draft_lm(kind, tie_word_embeddings=tied, **rope)
    model.save_pretrained(tmp_path)
    drafter = loaded(tmp_path, llama.target)
    check_says(drafter, llama, says(model, llama.text[:CONTEXT]))
    assert (drafter.num_drafts, drafter.taps) == (7, ())


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each != "under model."])
def test_files(llama: Tiny, tmp_path: Path, layout: str, tied: bool) -> None:
    model = draft_lm("llama", tie_word_embeddings=tied)
    tensors = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    write(tmp_path, model.config.to_dict(), tensors, layout)
    check_says(loaded(tmp_path, llama.target), llama, says(model, llama.text[:CONTEXT]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stored_in_half(llama: Tiny, tmp_path: Path, dtype: str) -> None:
    model = draft_lm("qwen3").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    right = draft_lm("qwen3")  # Whose rotary positions are no less exact for it.
    right.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    check_says(loaded(tmp_path, llama.target), llama, says(right, llama.text[:CONTEXT]))


def test_a_larger_vocabulary_is_padding(llama: Tiny, tmp_path: Path) -> None:
    model = draft_lm("qwen2", vocab_size=VOCAB + 9)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 9 * model.lm_head.weight[:9]
    model.save_pretrained(tmp_path)
    drafter, _ = noted(lambda: load_drafter(tmp_path, llama.target))
    text = llama.text[:CONTEXT]
    with torch.inference_mode():
        assert int(model(torch.tensor([text])).logits[0].argmax(-1).max()) >= VOCAB
    check_says(drafter, llama, says(model, text))


def smaller(folder: Path, target: CausalLM) -> tuple[Any, Any, int]:
    """A drafter that lacks the target's last tokens, its model, and how many it has."""
    count = 50
    model = draft_lm("qwen2", vocab_size=count)
    model.save_pretrained(folder)
    drafter, _ = noted(lambda: load_drafter(folder, target))
    return drafter, model, count


def test_a_smaller_vocabulary_is_all_that_is_drafted(llama: Tiny, tmp_path: Path) -> None:
    drafter, model, count = smaller(tmp_path, llama.target)
    text = [token % count for token in llama.text[:CONTEXT]]
    check_says(drafter, llama, says(model, text), text)
    # Tokens that it has not: it drafts behind them all the same, and nothing else is lost.
    strange = [*text[:10], count, VOCAB - 1, *text[10:], count + 1]
    logits, tokens = said(drafter, llama, strange)
    assert bool(logits[:, :count].isfinite().all()) and max(tokens) < count
    session = Session(llama.target, drafter)
    rounds = list(session.generate(llama.text[:PROMPT], 60))
    assert session.tokens == llama.text[: PROMPT + 60]
    assert all(r.drafted for r in rounds[1:-1])


def test_what_is_sampled_of_a_smaller_vocabulary(llama: Tiny, tmp_path: Path) -> None:
    """The probabilities are the target's vocabulary's, with nothing where nothing is drafted."""
    drafter, model, count = smaller(tmp_path, llama.target)
    text = [token % count for token in llama.text[:CONTEXT]]
    cache = drafter.new_cache(POSITIONS)
    append(drafter, cache, text[:-1])
    pick = Sampler(Sampling(temperature=0.8, seed=5)).pick(text, VOCAB)
    anchor, settings = torch.tensor([text[-1]]), [DraftSettings()]
    (draft,) = drafter.propose(Ragged(), [cache], anchor, DRAFTS, settings, [pick])
    assert draft.probabilities is not None and draft.probabilities.shape == (DRAFTS, VOCAB)
    right = (says(model, text) / 0.8).softmax(-1)
    torch.testing.assert_close(draft.probabilities.double(), right, rtol=1e-3, atol=1e-5)
    assert not bool(draft.probabilities[:, count:].any())
    sampled = Session(llama.target, drafter, sampling=Sampling(temperature=0.8, seed=5))
    assert len([t for r in sampled.generate(text, 60) for t in r.tokens]) == 60


def test_the_text_is_read_whole(llama: Tiny, tmp_path: Path) -> None:
    """What is drafted depends on the first token, on the mask and on the anchor."""
    model = draft_lm("qwen3")
    model.save_pretrained(tmp_path)
    drafter = loaded(tmp_path, llama.target)
    text = llama.text[:CONTEXT]
    logits = [
        said(drafter, llama, [*head, *text[1:-1], *end])[0]
        for head, end in (([text[0]], [text[-1]]), ([9], [text[-1]]), ([text[0]], [9]))
    ]
    assert not torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    config = json.loads((tmp_path / "config.json").read_text()) | {"pard_token": MASK + 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = said(loaded(tmp_path, llama.target), llama)[0]
    torch.testing.assert_close(other[0], logits[0][0])
    assert not torch.equal(other[1:], logits[0][1:])
