"""attach with windows, sinks and layers of their own, against masks written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sharpdraft import Constant, FixedSlope, SharpDraftError, scale_queries
from sharpdraft.adapters.attach import attach
from sharpdraft.method.policies import LayerSlopes
from sharpdraft.method.settings import DraftSettings, FixedLength, Window
from support.attention import Attention
from support.tiny import make_model

LOW = FixedSlope(9, slope=0.7, top_k=4, max_scale=8.0)


class Counting:
    """A policy that scales by 1 and keeps the counts it was asked about."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def gain(self, keys: Tensor) -> Tensor:
        self.seen.append(keys)
        return torch.zeros_like(keys, dtype=torch.float32)


def mask_of(kind: str, rows: int, context: int, behind: int, hidden: list[int]) -> Tensor:
    """Visible Keys, bool [2, rows, keys], of two requests, by definition: row i's own Key is in
    slot context + i, `behind` slots behind the rows are empty, and the second request has
    `hidden` slots, its padding on the left."""
    keys = context + rows + behind
    mask = torch.zeros(2, rows, keys, dtype=torch.bool)
    for request in range(2):
        for row in range(rows):
            for key in range(context + rows):
                if (kind == "block" or key <= context + row) and not (
                    request and key in hidden and key != context + row
                ):
                    mask[request, row, key] = True
    return mask


@given(
    rows=st.integers(1, 6),
    context=st.integers(0, 14),
    behind=st.sampled_from([0, 0, 5]),
    padding=st.integers(0, 3),
    causal=st.booleans(),
    given_as=st.sampled_from(["bool", "float", "min"]),
    keys=st.integers(1, 12),
    sinks=st.integers(0, 3),
)
def test_a_window_narrows_the_mask_that_is_given(
    rows: int,
    context: int,
    behind: int,
    padding: int,
    causal: bool,
    given_as: str,
    keys: int,
    sinks: int,
) -> None:
    """Whether rows' Keys are the last, or a static cache goes on behind them, whose mask says so;
    with padding on the left or without."""
    rng = torch.Generator().manual_seed(rows + 7 * context)
    mask = mask_of("causal" if causal else "block", rows, context, behind, list(range(padding)))
    total = mask.shape[-1]
    query = torch.randn(2, 3, rows, 4, generator=rng)
    key = torch.randn(2, 3, total, 4, generator=rng)
    expected = mask.clone()
    for request in range(2):
        for row in range(rows):
            first = mask[request, row].nonzero()[:, 0].tolist()[:sinks]
            for slot in range(total):
                if abs(context + row - slot) >= keys and slot not in first:
                    expected[request, row, slot] = False
    used = mask[:, None]
    if given_as != "bool":
        low = -torch.inf if given_as == "float" else torch.finfo(torch.float32).min
        used = torch.zeros(used.shape).masked_fill(~used, low)
    counting, module = Counting(), nn.Sequential(Attention())
    with attach(module, DraftSettings(counting, Window(keys, sinks))):
        weights = module[0](query, key, attn_mask=used)
    assert torch.equal(weights > 0, expected[:, None].expand(2, 3, rows, total))
    assert torch.equal(
        counting.seen[0].expand(2, 3, rows), expected.sum(-1)[:, None].expand(2, 3, rows)
    )
    plain = F.scaled_dot_product_attention(
        query, key, torch.eye(total).expand(2, 3, total, total), expected[:, None]
    )
    assert torch.allclose(weights, plain, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_a_padded_batch_sees_what_each_request_sees_alone(family: str, sinks: int) -> None:
    """Sinks are the first Keys of a request, not its padding: logits of a batch with padding on the
    left, whole and one token more, against those of each request alone."""
    model = make_model(family)
    texts = [[5, 9, 3, 17, 40, 2, 33, 8, 21, 60, 11, 7], [44, 12, 6, 19, 30, 1, 25]]
    settings = DraftSettings(LOW, Window(4, sinks))
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(t)) + [1] * len(t) for t in texts])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with attach(model, settings), torch.no_grad():
        alone = [model(torch.tensor([text])).logits[0] for text in texts]
        batch = model(ids, attention_mask=mask, position_ids=places, use_cache=True)
        step = torch.tensor([[13], [14]])
        longer = [model(torch.tensor([[*t, 13 + i]])).logits[0, -1] for i, t in enumerate(texts)]
        grown = torch.cat((mask, torch.ones(2, 1, dtype=mask.dtype)), -1)
        next_ = model(
            step,
            attention_mask=grown,
            position_ids=places[:, -1:] + 1,
            **{name: batch[name] for name in batch if name != "logits"},  # its cache
        ).logits[:, -1]
    for row, logits in enumerate(alone):
        torch.testing.assert_close(batch.logits[row, -len(logits) :], logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(next_, torch.stack(longer), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("keys", [3, 8, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_without_a_mask_rows_are_the_last_keys(keys: int, causal: bool) -> None:
    """With is_causal, of which PyTorch takes the first rows for the first Keys, the first."""
    rng = torch.Generator().manual_seed(0)
    rows, total = 5, 20
    query, key = (torch.randn(1, 2, n, 4, generator=rng) for n in (rows, total))
    module = nn.Sequential(Attention())
    with attach(module, DraftSettings(Constant(1.5), Window(keys, sinks=2))):
        weights = module[0](query, key, is_causal=causal)
    for row in range(rows):
        own = row if causal else total - rows + row
        for slot in range(total):
            near = abs(own - slot) < keys or slot < 2
            assert bool((weights[0, :, row, slot] > 0).all()) == (
                near and (slot <= own or not causal)
            )


def test_a_window_that_hides_nothing_leaves_the_call_as_it_is() -> None:
    module, calls = nn.Sequential(Attention()), []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is F.scaled_dot_product_attention:
                calls.append(kwargs)
            return func(*args, **(kwargs or {}))

    query, key = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 10, 4)
    with Watched(), attach(module, DraftSettings(view=Window(10))):
        module[0](query, key)
        module[0](query[..., :1, :], torch.cat((key, key), -2))
    assert calls[0].get("attn_mask") is None and calls[1]["attn_mask"].sum() == 10


def test_a_layer_with_a_window_of_its_own_keeps_the_narrower_and_no_sinks() -> None:
    """As in the lab: transformers' modules name theirs, and it is in the mask as well."""
    module = nn.Sequential(Attention(), Attention())
    module[0].sliding_window, module[1].sliding_window = 6, None
    query, key = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 30, 4)
    own = (torch.arange(30) > 30 - 1 - 6)[None, None, None]
    for width, seen in ((4, 4), (9, 6)):
        with attach(module, DraftSettings(view=Window(width, sinks=2))):
            assert int((module[0](query, key, attn_mask=own) > 0).sum()) == seen
            assert int((module[1](query, key) > 0).sum()) == width + 2


def test_every_layer_is_scaled_by_its_own_slope() -> None:
    slopes = (0.7, 1.3, 2.0)
    module = nn.Sequential(*(Attention() for _ in slopes))
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 30, 4)
    with attach(module, LayerSlopes(9, slopes, top_k=4, max_scale=8.0)):
        for layer, slope in zip(module, slopes, strict=True):
            gain = torch.full((1, 1, 1), math.log((30 - 4) / (9 - 4)) / slope)
            expected = F.scaled_dot_product_attention(
                scale_queries(query, gain), key, torch.eye(30).expand(1, 2, 30, 30)
            )
            assert torch.allclose(layer(query, key), expected, atol=1e-6)


def test_what_attach_cannot_do_is_refused_by_name() -> None:
    class Scores(Counting):
        needs = ("scores",)

    module = nn.Sequential(Attention(), Attention())
    for settings, message in (
        (DraftSettings(length=FixedLength(3)), r"length \(drafts@3\).*leave length out"),
        (LayerSlopes(9, (1.0, 2.0, 3.0), top_k=4), "for 3 layers, and the drafter has 2"),
    ):
        with pytest.raises(SharpDraftError, match=message):
            attach(module, settings)
    assert not any("forward" in vars(m) for m in module)
    with attach(module, None) as handle, pytest.raises(SharpDraftError, match="for 1 layers"):
        handle.settings = LayerSlopes(9, (1.0,), top_k=4)


def test_a_pass_that_fails_leaves_attention_elsewhere_as_it_was() -> None:
    class Failing(Attention):
        def forward(self, query: Tensor, key: Tensor, **how: Any) -> Tensor:
            super().forward(query, key, **how)
            raise KeyboardInterrupt

    query, key = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 30, 4)
    before = Attention()(query, key)
    module = nn.Sequential(Failing())
    with attach(module, LOW, attention=["0"]), pytest.raises(KeyboardInterrupt):
        module[0](query, key)
    assert torch.equal(Attention()(query, key), before)
