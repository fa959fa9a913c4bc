"""attach with windows, sinks and layers of their own, against masks written out by hand."""

from __future__ import annotations

import copy
import math
from functools import partial
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

LOW = FixedSlope(9, slope=0.7, top_k=4, max_scale=8.0)


class Attention(nn.Module):
    """Returns what weight each row gives to each Key, as the values are an identity."""

    def forward(self, query: Tensor, key: Tensor, **how: Any) -> Tensor:
        keys = key.shape[-2]
        value = torch.eye(keys).expand(*key.shape[:-2], keys, keys)
        return F.scaled_dot_product_attention(query, key, value, **how)


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
    for row in range(rows):
        for slot in range(total):
            if abs(context + row - slot) >= keys and slot >= sinks:
                expected[:, row, slot] = False
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


# What others do to a module


def by_others(module: nn.Module) -> Any:
    """A forward on the instance that knows its module, as accelerate puts there."""

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        module.hooked += 1
        return module.forward_before(*args, **kwargs)

    module.hooked, module.forward_before = 0, module.forward
    module.forward = partial(new_forward, module)
    return module


class Projected(Attention):
    """One whose output tells which weights it ran with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, key: Tensor, **how: Any) -> Tensor:
        return self.weight * super().forward(query, key, **how)


@pytest.mark.parametrize("hooked", ["before", "behind", "not"])
def test_deep_copies_run_on_their_own_weights(hooked: str) -> None:
    module = nn.Sequential(Projected())
    query, key = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 12, 4)
    plain = module[0](query, key)
    if hooked == "before":
        by_others(module[0])
    handle = attach(module, Constant(3.0), attention=["0"])
    if hooked == "behind":
        by_others(module[0])
    scaled = module[0](query, key)
    assert not torch.equal(scaled, plain)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied[0].weight.fill_(2.0)
    assert torch.equal(copied[0](query, key), 2 * scaled)
    assert torch.equal(module[0](query, key), scaled)
    handle.detach()
    assert torch.equal(module[0](query, key), plain)
    assert torch.equal(copied[0](query, key), 2 * plain)
    if hooked == "not":
        assert "forward" not in vars(module[0])
    else:
        assert module[0].hooked == 3 and copied[0].hooked == 3
    with attach(module, Constant(3.0), attention=["0"]):
        assert torch.equal(module[0](query, key), scaled)


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
