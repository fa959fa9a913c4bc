"""attach from outside: on modules of one's own, on z-lab's drafter, on an assistant model of
transformers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from sharpdraft import Constant, FixedSlope, SharpDraftError, scale_queries
from sharpdraft.adapters.attach import attach
from sharpdraft.decode.session import Arm, Session
from sharpdraft.drafters.dflash import DFlash
from sharpdraft.method.settings import DraftSettings, Window
from sharpdraft.method.visible import visible_keys
from support.drafters import drafter_config, drafter_tensors
from support.tiny import PROMPT, VOCAB, Tiny, continuation, make_model

LOW = FixedSlope(9, slope=0.7, top_k=4, max_scale=8.0)


class Counting:
    """A policy that scales by 1 and keeps the counts it was asked about."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def gain(self, keys: Tensor) -> Tensor:
        self.seen.append(keys)
        return torch.zeros_like(keys, dtype=torch.float32)


@given(
    rows=st.integers(1, 6),
    keys=st.integers(1, 12),
    heads=st.sampled_from([1, 3]),
    kind=st.sampled_from(["none", "causal", "bool", "float", "min", "one row"]),
    seed=st.integers(0, 1000),
)
def test_counts_are_the_keys_with_weight(
    rows: int, keys: int, heads: int, kind: str, seed: int
) -> None:
    """Against attention itself: a Key is seen if its value reaches the output."""
    rng = torch.Generator().manual_seed(seed)
    query, key = (
        torch.randn(2, 3, rows, 4, generator=rng),
        torch.randn(2, 3, keys, 4, generator=rng),
    )
    value = torch.eye(keys).expand(2, 3, keys, keys)
    mask = torch.rand(2, heads, 1 if kind == "one row" else rows, keys, generator=rng) < 0.6
    mask[..., 0] = True
    if kind in ("float", "min"):
        low = -torch.inf if kind == "float" else torch.finfo(torch.float32).min
        mask = torch.zeros(mask.shape).masked_fill(~mask, low)
    used = None if kind in ("none", "causal") else mask
    weights = F.scaled_dot_product_attention(query, key, value, used, is_causal=kind == "causal")
    counts = visible_keys(query, key, used, kind == "causal")
    assert counts.dim() == 3
    assert torch.equal(counts.expand(2, 3, rows), (weights > 0).sum(-1))


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, by_keyword: bool = False) -> Tensor:
        if by_keyword:
            return F.scaled_dot_product_attention(query=query, key=key, value=key, attn_mask=None)
        return F.scaled_dot_product_attention(query, key, key)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), nn.ModuleDict({"core": Attention()})

    def forward(self, query: Tensor, key: Tensor, **kwargs: Any) -> Tensor:
        return self.second["core"](self.first(query, key, **kwargs), key, **kwargs)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_queries_are_scaled_until_detached(by_keyword: bool) -> None:
    module = Own()
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 30, 4)
    before = module(query, key)
    gain = LOW.gain(torch.tensor([[[30]]]))
    first = F.scaled_dot_product_attention(scale_queries(query, gain), key, key)
    both = F.scaled_dot_product_attention(scale_queries(first, gain), key, key)
    with attach(module, LOW) as handle:
        assert torch.equal(module(query, key, by_keyword=by_keyword), both)
        handle.settings = None
        assert torch.equal(module(query, key), before)
    assert torch.equal(module(query, key), before)
    assert not any("forward" in vars(m) for m in module.modules())
    with attach(module, LOW, attention=["first"]):
        assert torch.equal(module(query, key), F.scaled_dot_product_attention(first, key, key))
    handle.detach()


def test_attention_elsewhere_is_left_alone() -> None:
    module, other = Own(), Own()
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 30, 4)
    before = other(query, key)
    with attach(module, Constant(3.0)):
        module(query, key)
        assert torch.equal(other(query, key), before)


def test_refusals() -> None:
    class Eager(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return (query @ key.transpose(-1, -2)).softmax(-1) @ key

    module = nn.Sequential(Eager())
    with pytest.raises(SharpDraftError, match="name them in `attention`"):
        attach(module, LOW)
    with pytest.raises(SharpDraftError, match="no module nowhere"):
        attach(module, LOW, attention=["nowhere"])
    with (
        attach(module, LOW, attention=["0"]),
        pytest.raises(SharpDraftError, match="0 attends without"),
    ):
        module[0](torch.ones(1, 1, 2), torch.ones(1, 3, 2))
    own = Own()
    with attach(own, LOW), pytest.raises(SharpDraftError, match="first is attached to already"):
        attach(own, LOW)
    with pytest.raises(SharpDraftError, match=r"second\.core is part of another module"):
        attach(own, LOW, attention=["second", "second.core"])
    model = make_model("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(SharpDraftError, match='"eager", which shows no mask'):
        attach(model, LOW)


@pytest.fixture(scope="module")
def assistant() -> Any:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(3)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=256, num_key_value_heads=2, **sizes, **ids
    )
    return LlamaForCausalLM(config).eval()


def test_an_assistant_model_in_generate(llama: Tiny, assistant: Any) -> None:
    """The output is the target's whatever the policy, and every count is that of the Keys in the
    cache."""
    prompt = llama.text[:PROMPT]
    plain = continuation(llama.model, prompt, 40, assistant_model=assistant)
    assert plain == llama.text[PROMPT : PROMPT + 40]
    weights = {name: tensor.clone() for name, tensor in assistant.state_dict().items()}
    counting = Counting()
    expected: list[list[int]] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Cached tokens up to each row's own, less those that transformers takes for padding."""
        rows, mask = kwargs["position_ids"][0].tolist(), kwargs.get("attention_mask")
        expected.append([p + 1 if mask is None else int(mask[0, : p + 1].sum()) for p in rows])

    hook = assistant.model.register_forward_pre_hook(note, with_kwargs=True)
    with attach(assistant, counting) as handle:
        assert continuation(llama.model, prompt, 40, assistant_model=assistant) == plain
        layers = assistant.config.num_hidden_layers
        assert len(counting.seen) == layers * len(expected) and len(expected) > 10
        seen = [
            keys.expand(1, 1, len(e)).flatten().tolist()
            for keys, e in zip(counting.seen[::layers], expected, strict=True)
        ]
        assert seen == expected
        handle.settings = LOW
        assert continuation(llama.model, prompt, 40, assistant_model=assistant) == plain
    hook.remove()
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in assistant.state_dict().items()
    )


def test_z_labs_drafter_accepts_what_our_loop_accepts(llama: Tiny) -> None:
    model = pytest.importorskip("dflash.model")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    model._cuda_time = time.perf_counter
    config = drafter_config(num_attention_heads=4, num_key_value_heads=2)
    tensors = drafter_tensors(config)
    theirs = model.DFlashDraftModel(Qwen3Config(**config)).eval()
    theirs.load_state_dict(tensors)
    theirs.set_attn_implementation("sdpa")
    session = Session(llama.target, DFlash(config, tensors, llama.target))
    prompt, new = llama.text[: PROMPT + 20], 80

    def accepted() -> list[int]:
        ids = torch.tensor([prompt])
        out = model.dflash_generate(theirs, llama.model, ids, new, None, return_stats=True)
        assert out.output_ids[0].tolist() == llama.text[: len(prompt) + new]
        return list(out.acceptance_lengths)

    def ours(settings: DraftSettings) -> list[int]:
        session.rewind(0)
        session.use(Arm("ours", "", settings))
        # At the very end z-lab drafts one token more than can be written, which changes what the
        # others guess.
        rounds = list(session.generate(prompt, new))[1:]
        block = session.num_drafts + 1
        return [r.accepted + 1 for r in rounds if r.context + block < len(prompt) + new]

    def agree(theirs: list[int], ours: list[int]) -> bool:
        return len(ours) > 10 and theirs[: len(ours)] == ours

    frozen = accepted()
    assert agree(frozen, ours(DraftSettings()))
    for settings in (DraftSettings(LOW), DraftSettings(LOW, Window(12, sinks=3))):
        with attach(theirs, settings):
            scaled = accepted()
        assert agree(scaled, ours(settings)) and not agree(scaled, ours(DraftSettings()))
        assert accepted() == frozen
