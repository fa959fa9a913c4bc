"""Layers of vLLM that scale their Queries, with stand-ins for what the plugin meets there."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sharpdraft import FixedSlope, scale_queries
from sharpdraft.adapters.vllm.layers import put_on
from sharpdraft.method.policies import LayerSlopes
from sharpdraft.method.settings import DraftSettings, Window
from support.vllm_standin import Attention, ForwardPass, Metadata, attached, kept, visible

POLICY = FixedSlope(40, top_k=8)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 6)), min_size=1, max_size=5),
    causal=st.booleans(),
    window=st.none() | st.integers(6, 120),
    padding=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_queries_are_scaled_by_the_keys_each_row_sees(
    lengths: list[tuple[int, int]],
    causal: bool,
    window: int | None,
    padding: int,
    dtype: torch.dtype,
) -> None:
    """Any batch mix, any window, padding rows behind; the arithmetic is the method's to the bit."""
    layer = Attention(window)
    attached(layer)
    rows = sum(r for _, r in lengths)
    starts = torch.tensor(
        [0, *torch.tensor([r for _, r in lengths]).cumsum(0).tolist()], dtype=torch.int32
    )
    metadata = Metadata(
        starts, torch.tensor([c + r for c, r in lengths], dtype=torch.int32), causal
    )
    query = torch.randn(rows + padding, 3, 4, generator=torch.Generator().manual_seed(rows)).to(
        dtype
    )
    got = layer.call(query, metadata)
    gain = POLICY.gain(torch.tensor(visible(lengths, causal, window) + [0] * padding))
    assert torch.equal(got, scale_queries(query, gain[:, None]))
    assert torch.equal(got[rows:], query[rows:])


def test_identity_to_the_bit_where_nothing_exceeds_the_reference() -> None:
    layer = Attention()
    attached(layer)
    query = torch.tensor([[[0.0, -0.0, 1e-42, 3.4e38]]])
    got = layer.call(query, Metadata(torch.tensor([0, 1]), torch.tensor([40]), causal=False))
    assert got.numpy().tobytes() == query.numpy().tobytes()


def test_metadata_updated_in_place_between_passes_is_counted_anew() -> None:
    """Sequential drafting: the same metadata object, one Key more each step; a module a step (MTP)
    included."""
    first, second = Attention(), Attention()
    _, now = attached(first, second)
    metadata = Metadata(torch.tensor([0, 1]), torch.tensor([100]))
    query = torch.ones(1, 1, 2)
    for layer in (first, second, first):
        expected = scale_queries(query, POLICY.gain(metadata.seq_lens)[:, None])
        assert torch.equal(layer.call(query, metadata), expected)
        metadata.seq_lens += 1
        now.it = ForwardPass()


def test_layers_of_one_pass_share_their_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    gain = FixedSlope.gain
    monkeypatch.setattr(
        FixedSlope, "gain", lambda self, keys: computed.append(1) or gain(self, keys)
    )
    layers = [Attention(), Attention(), Attention(window=64)]
    _, now = attached(*layers)
    metadata = Metadata(torch.tensor([0, 2]), torch.tensor([100]))
    for layer in layers:
        layer.call(torch.ones(2, 1, 2), metadata)
    assert len(computed) == 2
    now.it = ForwardPass()
    layers[0].call(torch.ones(2, 1, 2), metadata)
    assert len(computed) == 3


def test_metadata_of_a_finished_pass_is_not_kept_alive() -> None:
    layer = Attention()
    attached(layer)
    metadata = Metadata(torch.tensor([0, 1]), torch.tensor([100]))
    before = sys.getrefcount(metadata)
    layer.call(torch.ones(1, 1, 2), metadata)
    assert sys.getrefcount(metadata) == before


def test_without_metadata_nothing_happens() -> None:
    """vLLM's profiling run has none."""
    layer = Attention()
    attached(layer)
    query = torch.randn(3, 1, 2)
    assert torch.equal(layer.call(query, None), query)


def test_a_quantised_query_is_scaled_before_it_is_quantised() -> None:
    class Quant(torch.nn.Module):
        def forward(self, query: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            assert query.dim() == 2, "vLLM quantises [tokens, heads * head_dim]"
            return (query / scale).round(), scale

    layer = Attention(quant=Quant())
    attached(layer)
    assert layer.query_quant is None, (
        "else the layer quantises first, and what is left to scale is 8 bits wide"
    )
    query = torch.randn(1, 2, 4) * 9
    metadata = Metadata(torch.tensor([0, 1]), torch.tensor([400]))
    scaled = scale_queries(query, POLICY.gain(metadata.seq_lens)[:, None])
    assert torch.equal(layer.call(query, metadata), (scaled / 2).round())


def test_layers_that_cannot_be_counted_are_refused_with_the_reason() -> None:
    class MLAAttention(Attention):
        pass

    class Odd(Attention):
        pass

    direct = Attention()
    direct.use_direct_call = True
    other_hooks = Attention()
    other_hooks.impl.forward = lambda query, layer: None  # type: ignore[assignment, misc]
    reasons, _ = attached(
        MLAAttention(), Attention(backend="FLASHINFER"), direct, other_hooks, Attention()
    )
    assert list(reasons) == ["layer.0", "layer.1", "layer.2", "layer.3"]
    assert "MLAAttention" in reasons["layer.0"]
    assert "FLASHINFER" in reasons["layer.1"] and "attention_backend" in reasons["layer.1"]
    assert "run time" in reasons["layer.2"]
    assert "(query, layer, ...)" in reasons["layer.3"]
    reasons, _ = attached(Attention(), context_parallel=True)
    assert "context parallelism" in reasons["layer.0"]


def test_counts_are_read_when_a_graph_of_the_pass_is_replayed() -> None:
    """What a CUDA graph needs, shown with a traced graph: no host read, shapes from shapes, counts
    from buffers."""
    policy = POLICY

    def step(query: Tensor, start: Tensor, lengths: Tensor) -> Tensor:
        layer = Attention()
        put_on({"x": layer}, DraftSettings(policy), ForwardPass)
        return layer.call(query, Metadata(start, lengths, causal=False))

    from torch.fx.experimental.proxy_tensor import make_fx

    query, start = torch.randn(4, 1, 2), torch.tensor([0, 2, 4])
    # Symbolic tracing stops at anything that reads a value, such as .item() or a branch on a
    # tensor.
    graph = make_fx(step, tracing_mode="fake")(query, start, torch.tensor([10, 10]))
    for lengths in ([10, 10], [100, 41], [5000, 80]):
        expected = scale_queries(
            query, policy.gain(torch.tensor(lengths).repeat_interleave(2))[:, None]
        )
        assert torch.equal(graph(query, start, torch.tensor(lengths)), expected)


# Windows


def by_hand(
    query: Tensor,
    caches: Sequence[tuple[Tensor, Tensor]],
    lengths: Sequence[tuple[int, int]],
    causal: bool,
    window: int | None,
    scale: Callable[[int], float],
) -> Tensor:
    """Attention of each row over the Keys that it sees, its Query times `scale` of their number."""
    out, at = [], 0
    for (context, rows), (keys, values) in zip(lengths, caches, strict=True):
        for row in range(context, context + rows):
            seen = [
                j
                for j in range(context + rows)
                if (not causal or j <= row) and (window is None or abs(row - j) < window)
            ]
            scores = scale(len(seen)) * (query[at] @ keys[seen].mT)
            out.append(scores.softmax(-1) @ values[seen])
            at += 1
    return torch.stack(out)


@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN", "FLEX_ATTENTION", "TRITON_ATTN"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "block"])
@pytest.mark.parametrize(
    ("own", "asked", "left"), [(None, None, None), (None, 7, 7), (20, 7, 7), (7, 20, 7)]
)
@pytest.mark.parametrize("policy", [None, POLICY, LayerSlopes(40, (3.0, 5.0), top_k=8)])
def test_layers_see_and_count_what_a_window_leaves(
    backend: str,
    causal: bool,
    own: int | None,
    asked: int | None,
    left: int | None,
    policy: Any,
) -> None:
    layers = [Attention(own, backend), Attention(own, backend)]
    keys = 9 if left else 40
    policy = policy and replace(policy, reference=keys - 4, top_k=2)
    settings = DraftSettings(policy, None if asked is None else Window(asked))
    refused, _ = attached(*layers, settings=settings)
    assert not refused
    lengths = [(50, 3), (2, 5), (13, 1)]
    rng = torch.Generator().manual_seed(7)
    query = torch.randn(9, 2, 4, generator=rng)
    caches = [
        (torch.randn(c + r, 4, generator=rng), torch.randn(c + r, 4, generator=rng))
        for c, r in lengths
    ]
    metadata = Metadata(
        torch.tensor([0, 3, 8, 9]), torch.tensor([c + r for c, r in lengths]), causal
    )
    for layer, slope in zip(layers, (3.0, 5.0), strict=True):
        slope = slope if isinstance(policy, LayerSlopes) else 5.0

        def scale(n: int, slope: float = slope) -> float:
            if policy is None:
                return 1.0
            ratio = max((n - policy.top_k) / (policy.reference - policy.top_k), 1)
            return min(policy.max_scale, 1 + math.log(ratio) / slope)

        expected = by_hand(query, caches, lengths, causal, left, scale)
        assert torch.allclose(layer.attend(query, caches, metadata), expected, atol=1e-5)
        assert layer.sliding_window == own, "the cache keeps what it would keep"
        assert layer.impl.sliding_window == kept(backend, left)


def test_a_window_alone_wraps_nothing() -> None:
    layer = Attention()
    attached(layer, settings=DraftSettings(view=Window(16)))
    assert "forward" not in vars(layer.impl)


def test_layers_of_equal_slope_and_window_share_their_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = []
    gain = FixedSlope.gain
    monkeypatch.setattr(
        FixedSlope, "gain", lambda self, keys: computed.append(self.slope) or gain(self, keys)
    )
    layers = [Attention(), Attention(), Attention(), Attention(window=64)]
    policy = LayerSlopes(40, (3.0, 5.0, 3.0, 3.0), top_k=8)
    attached(*layers, settings=DraftSettings(policy))
    metadata = Metadata(torch.tensor([0, 2]), torch.tensor([100]))
    for layer in layers:
        layer.call(torch.ones(2, 1, 2), metadata)
    assert computed == [3.0, 5.0, 3.0]


def test_layers_that_cannot_have_a_window_are_left_as_they_are() -> None:
    otherwise = Attention()
    otherwise.impl.sliding_window = 0
    layers = [
        Attention(backend="ROCM_AITER_FA"),
        otherwise,
        Attention(backend="FLEX_ATTENTION"),
        Attention(window=8, backend="ROCM_AITER_FA"),
        Attention(),
    ]
    before = [layer.impl.sliding_window for layer in layers]
    refused, _ = attached(*layers, settings=DraftSettings(POLICY, Window(16)), full_graphs=True)
    assert list(refused) == ["layer.0", "layer.1", "layer.2"]
    assert "ROCM_AITER_FA" in refused["layer.0"] and "TRITON_ATTN" in refused["layer.0"]
    assert "otherwise than relied on" in refused["layer.1"]
    assert "PIECEWISE" in refused["layer.2"]
    assert [layer.impl.sliding_window for layer in layers] == [*before[:4], (15, 0)]
    assert ["forward" in vars(layer.impl) for layer in layers] == [False] * 3 + [True] * 2
