"""Rows of a pass: what each sees, what that makes of its gain, and where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharpdraft import FixedSlope, SharpDraftError, mask_keys
from sharpdraft.method.policies import Constant, LayerSlopes
from sharpdraft.method.scale import Policy, Scale, policy_at
from sharpdraft.method.visible import CAUSAL, View
from sharpdraft.model.cache import KVCache
from sharpdraft.model.kernels import build
from sharpdraft.model.placement import Ragged, Static
from sharpdraft.model.rotary import rotate
from sharpdraft.model.rows import RaggedRows
from sharpdraft.model.static_rows import StaticRows
from support.kernels import CAPACITY, WIDTHS, filled, rotary_for, textbook

POLICIES = [None, FixedSlope(33), FixedSlope(100, slope=0.3, max_scale=4.0), Constant(1.3)]
SLOPES = LayerSlopes(40, (0.5, 3.0, 0.5))
VIEWS = st.builds(
    View, st.booleans(), st.sampled_from([None, 1, 7, 65]), st.sampled_from([0, 1, 4, 70])
)
SPANS = st.tuples(st.integers(0, 380), st.integers(1, 17))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def ragged(spans: Sequence[tuple[int, int]]) -> RaggedRows:
    caches = [KVCache(1, 1, 8, CAPACITY) for _ in spans]
    return RaggedRows(caches, [s for s, _ in spans], [c for _, c in spans], rotary_for(8))


def gain_by_mask(scale: Scale | None, layer: int, view: View, start: int, count: int) -> Tensor:
    """What a policy says of a mask that is counted."""
    policy = policy_at(scale, layer)
    seen = mask_keys(view.sees(torch.arange(start, start + count), start + count))
    return torch.zeros(count) if policy is None else policy.gain(seen)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 380), st.integers(1, 17), st.sampled_from([*POLICIES, SLOPES])),
        min_size=1,
        max_size=4,
    ),
    st.lists(VIEWS, min_size=3, max_size=3),
)
def test_gains_are_the_policys_at_the_keys_each_row_sees(
    requests: list[tuple[int, int, Policy | None]], views: list[View]
) -> None:
    scales = [scale for _, _, scale in requests]
    found = ragged([(start, count) for start, count, _ in requests]).gains(scales, views)
    for layer, (gain, view) in enumerate(zip(found, views, strict=True)):
        if gain is None:
            assert all(scale is None for scale in scales)
        else:
            own = [gain_by_mask(scale, layer, view, s, c) for s, c, scale in requests]
            assert torch.equal(gain, torch.cat(own))


def test_layers_alike_share_a_gain() -> None:
    rows, window = ragged([(50, 3), (90, 2)]), View(True, 9)
    first, second, third = rows.gains([FixedSlope(33), None], [CAUSAL, View(), window])
    assert first is second is not None and third is not first
    first, second, third = rows.gains([SLOPES, None], [CAUSAL] * 3)
    assert first is third is not None and not torch.equal(first, second)
    assert rows.gains([], [CAUSAL] * 3) == rows.gains([None, None], [CAUSAL] * 3) == [None] * 3


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("width", [0, *WIDTHS])
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 99), max_size=90), st.integers(1, 9)),
        min_size=1,
        max_size=3,
    ),
    VIEWS,
    st.sampled_from(POLICIES),
)
def test_a_compacted_cache_is_a_whole_one_with_keys_masked(
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    requests: list[tuple[set[int], int]],
    view: View,
    policy: Policy | None,
) -> None:
    """Of 100 Keys some are kept, in the first slots and as they were rotated; new rows are rotated
    to positions from 100 on, and see and count what is in their slots."""
    heads, kv_heads, dim, past = 4, 2, 16, 100
    rotary = rotary_for(dim)
    spans = [(len(kept), count) for kept, count in requests]
    caches, wholes = [], []
    for number, (kept, _) in enumerate(requests):
        whole = filled(kv_heads, dim, past, number)
        cache = filled(kv_heads, dim, len(kept), 7)
        order = sorted(kept)
        for mine, theirs in ((cache.keys, whole.keys), (cache.values, whole.values)):
            mine[..., : len(order), :] = theirs[..., order, :]
        caches.append(cache)
        wholes.append((whole, order))
    rows = sum(count for _, count in spans)
    rng = torch.Generator().manual_seed(rows)
    qkv = torch.randn(1, rows, (heads + 2 * kv_heads) * dim, generator=rng)
    with monkeypatch.context() as patch:
        patch.setattr(build, "lanes", lambda size: width)
        slots, counts = [start for start, _ in spans], [count for _, count in spans]
        new = RaggedRows(caches, slots, counts, rotary, [past] * len(spans))
        assert (new.place is not None) == bool(width)
        (gain,) = new.gains([policy] * len(spans), [view])
        found = new.attention(1, qkv.clone(), heads, kv_heads, view, gain=gain)
    expected = []
    for (whole, order), (start, count), own in zip(
        wholes, spans, qkv[0].split(counts), strict=True
    ):
        each = own.view(count, -1, dim).transpose(0, 1)
        at = slice(past, past + count)
        query, keys = (
            rotate(x, rotary.cos[at], rotary.sin[at])
            for x in (each[:heads], each[heads : heads + kv_heads])
        )
        sees = view.sees(torch.arange(start, start + count), start + count)
        if policy is not None:
            query = query * (1 + policy.gain(sees.sum(-1)))[:, None]
        visible = torch.zeros(count, past + count, dtype=torch.bool)
        visible[:, [*order, *range(past, past + count)]] = sees
        all_keys = torch.cat((whole.keys[1, 0, :, :past], keys), dim=1)
        all_values = torch.cat((whole.values[1, 0, :, :past], each[heads + kv_heads :]), dim=1)
        expected.append(textbook(query, all_keys, all_values, visible))
    torch.testing.assert_close(found[0], torch.cat(expected), rtol=1e-3, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300), st.integers(1, 9), VIEWS, st.sampled_from([*POLICIES, SLOPES]))
def test_static_rows_are_ragged_ones(
    length: int, count: int, view: View, scale: Scale | None
) -> None:
    """The same gains, attention and cache, though only the device knows where the rows are."""
    rotary, rows = rotary_for(8), []
    placed: list[Ragged | Static] = [Ragged(), Static(torch.tensor([length]), 384)]
    for placement in placed:
        cache = filled(2, 8, length, 0)
        if isinstance(placement, Static):
            cache.blank()
        rows.append(placement.rows([cache], [count], rotary))
    first, second = rows
    assert isinstance(first, RaggedRows) and isinstance(second, StaticRows)
    qkv = torch.randn(1, count, 8 * 8)
    gains = [each.gains([scale], [view, CAUSAL]) for each in rows]
    for one, other in zip(*gains, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    mixed = [
        each.attention(0, qkv.clone(), 4, 2, view, gain=gain[0])
        for each, gain in zip(rows, gains, strict=True)
    ]
    torch.testing.assert_close(*mixed, rtol=1e-3, atol=1e-4)
    end = length + count
    for name in ("keys", "values"):
        one, other = (getattr(rows[0].caches[0], name), getattr(rows[1].cache, name))
        torch.testing.assert_close(one[0, ..., :end, :], other[0, ..., :end, :])


@pytest.mark.parametrize("view", [View(True, 7, 3), View(True, 65), View(False, 40, 70)])
@pytest.mark.parametrize("static", [False, True])
def test_memory_that_no_row_may_see_is_not_read(
    monkeypatch: pytest.MonkeyPatch, static: bool, view: View
) -> None:
    """On the plain path too, where what is not read may hold what is no number."""
    monkeypatch.setattr(build, "lanes", lambda size: 0)
    length, count, mixed = 200, 5, []
    placement = Static(torch.tensor([length]), 256) if static else Ragged()
    qkv = torch.randn(1, count, 8 * 8)
    for dirty in (False, True):
        cache = filled(2, 8, length, 0)
        cache.blank()
        sinks, first = view.reach(length)
        assert (sinks, first) == (view.sinks, length + 1 - (view.window or 0))
        if dirty:
            cache.keys[..., sinks:first, :] = cache.values[..., sinks:first, :] = torch.nan
        rows = placement.rows([cache], [count], rotary_for(8))
        mixed.append(rows.attention(0, qkv.clone(), 4, 2, view))
    assert torch.equal(*mixed)


def test_placements_place_rows_behind_what_is_cached() -> None:
    caches = [filled(1, 8, length, 0) for length in (20, 31)]
    rotary = rotary_for(8)
    behind = Ragged().rows(caches, [2, 3], rotary, -1)
    assert behind.starts == behind.positions == [19, 30] and behind.counts == [2, 3]
    assert torch.equal(behind.cos, rotary.cos[[19, 20, 30, 31, 32]])
    static = Static(torch.tensor([20]), 64).rows(caches[:1], [3], rotary, -1)
    assert static.at.tolist() == [19, 20, 21] and static.keys == 64
    assert torch.equal(static.sin, rotary.sin[19:22])


@pytest.mark.parametrize("static", [False, True])
def test_rows_are_written_in_one_layer_or_all(static: bool) -> None:
    spans = [(4, 2)] if static else [(4, 2), (0, 3)]
    caches = [KVCache(3, 2, 8, 10) for _ in spans]
    for cache in caches:
        cache.keys.fill_(7)
        cache.values.fill_(7)
    rotary = rotary_for(8)
    rows: RaggedRows | StaticRows
    if static:
        rows = StaticRows(caches[0], torch.tensor([4]), 2, 10, rotary)
    else:
        rows = RaggedRows(caches, [4, 0], [2, 3], rotary)
    total = sum(count for _, count in spans)
    every, one = torch.randn(3, 2, total, 8), torch.randn(1, 2, total, 8)
    rows.write(slice(None), every, -every)
    rows.write(1, one, -one)
    expected = torch.stack((every[0], one[0], every[2]))
    counts = [count for _, count in spans]
    for cache, (start, count), own in zip(caches, spans, expected.split(counts, 2), strict=True):
        whole = torch.full((3, 1, 2, 10, 8), 7.0)
        whole[:, 0, :, start : start + count] = own
        assert torch.equal(cache.keys, whole)
        assert torch.equal(cache.values, torch.where(whole == 7, whole, -whole))


def test_what_rows_refuse() -> None:
    cache, rotary = KVCache(1, 1, 8, 20), rotary_for(8, 50)
    with pytest.raises(SharpDraftError, match=r"context full: 18 \+ 3 tokens do not fit into 20"):
        RaggedRows([cache], [18], [3], rotary)
    with pytest.raises(SharpDraftError, match=r"context full: 48 \+ 3 tokens do not fit into 50"):
        RaggedRows([cache], [5], [3], rotary, [48])
    RaggedRows([cache], [17], [3], rotary, [47])
    with pytest.raises(SharpDraftError, match="a row of every request"):
        RaggedRows([cache, cache], [1, 2], [1, 0], rotary)


def test_masks_are_made_once_for_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", lambda lanes: None)
    made: list[View] = []
    right = View.mask

    def noting(self: View, *args: int) -> Tensor | None:
        made.append(self)
        return right(self, *args)

    monkeypatch.setattr(View, "mask", noting)
    rows = ragged([(50, 3)])
    for view in (CAUSAL, View(True, 9, 2), replace(CAUSAL), View(True, 9, 2)):
        rows.attention(0, torch.randn(1, 3, 3 * 8), 1, 1, view)
    assert made == [CAUSAL, View(True, 9, 2)]
