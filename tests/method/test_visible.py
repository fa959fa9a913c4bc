"""Counts of visible Keys and masks against a rule that is written out Key by Key."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpdraft.method.visible import (
    CAUSAL,
    View,
    block_keys,
    causal_keys,
    mask_keys,
    ragged_keys,
    visible_keys,
)

quick = settings(max_examples=80, deadline=None)
windows = st.none() | st.integers(1, 24)
sinks_ = st.integers(0, 9)
contexts = st.lists(st.integers(0, 20), min_size=1, max_size=4)
views = st.builds(View, st.booleans(), windows, sinks_)


def visible(own: int, key: int, view: View) -> bool:
    """Whether the row in slot `own` sees the Key in slot `key`, which is there."""
    if view.causal and key > own:
        return False
    return view.window is None or abs(own - key) < view.window or key < view.sinks


def request_mask(past: int, rows: int, width: int, view: View) -> torch.Tensor:
    """Mask [rows, width] of one request whose real Keys are the first past + rows of width."""
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row in range(rows):
        for key in range(past + rows):
            mask[row, key] = visible(past + row, key, view)
    return mask


def batch_mask(past: list[int], rows: int, view: View) -> torch.Tensor:
    width = max(past) + rows + 3
    return torch.stack([request_mask(p, rows, width, view) for p in past])


def test_known_counts():
    assert block_keys(10, 4).tolist() == [[14, 14, 14, 14]]
    assert block_keys(torch.tensor([0, 5]), 2).tolist() == [[2, 2], [7, 7]]
    # Row 0 in slot 10: itself, two Keys before it and two of the three ahead. Row 3 in slot 13:
    # itself and two before.
    assert block_keys(10, 4, window=3).tolist() == [[5, 5, 4, 3]]
    assert block_keys(10, 4, window=1).tolist() == [[1, 1, 1, 1]]
    assert block_keys(10, 4, window=3, sinks=2).tolist() == [[7, 7, 6, 5]]
    # Slots 0 to 4 alone: a sink ahead is seen as well.
    assert block_keys(0, 5, window=1, sinks=4).tolist() == [[4, 4, 4, 4, 5]]
    assert causal_keys(10, 3).tolist() == [[11, 12, 13]]
    assert causal_keys(10, 3, window=12).tolist() == [[11, 12, 12]]
    assert causal_keys(10, 3, window=4, sinks=2).tolist() == [[6, 6, 6]]
    assert causal_keys(2, 3, window=2, sinks=2).tolist() == [[3, 4, 4]]
    assert causal_keys(torch.tensor([0, 7]), 1).tolist() == [[1], [8]]


@settings(max_examples=300, deadline=None)
@given(views, st.integers(0, 40), st.integers(1, 9))
def test_a_view_counts_what_its_mask_shows(view, context, rows):
    expected = request_mask(context, rows, context + rows, view)
    shown = view.sees(torch.arange(context, context + rows), context + rows)
    assert torch.equal(shown, expected)
    # Slots behind the last row hold nothing yet.
    wider = view.sees(torch.arange(context, context + rows), context + rows + 3)
    assert torch.equal(wider[:, : context + rows], expected)
    if view.causal or view.window is None or view.sinks <= context + rows:
        assert not wider[:, context + rows :].any()
    mask = view.mask(context, rows, torch.device("cpu"))
    assert (mask is None) == (not view.hides(context, rows))
    assert expected.all() if mask is None else torch.equal(mask, expected)
    if not view.sinks:
        assert view.hides(context, rows) == (not expected.all())
    for given_as in (context, torch.tensor([context])):
        assert view.count(given_as, rows).tolist() == expected.sum(-1).tolist()


def test_a_view_as_it_is_sees_all_up_to_its_own_slot():
    assert View() == CAUSAL == View(causal=True, window=None, sinks=0)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"window": -3}, "window must be at least 1, got -3"),
        ({"sinks": -1}, "sinks must not be negative, got -1"),
    ],
)
def test_views_that_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        View(**fields)


@quick
@given(contexts, st.integers(1, 9), windows, sinks_)
def test_block_keys_equal_the_mask(context, block, window, sinks):
    counts = block_keys(torch.tensor(context, dtype=torch.int32), block, window, sinks)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, mask_keys(batch_mask(context, block, View(False, window, sinks))))
    assert torch.equal(counts[:1], block_keys(context[0], block, window, sinks))


@quick
@given(contexts, st.integers(1, 9), windows, sinks_)
def test_causal_keys_equal_the_mask(past, rows, window, sinks):
    counts = causal_keys(torch.tensor(past), rows, window, sinks)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, mask_keys(batch_mask(past, rows, View(True, window, sinks))))
    assert torch.equal(counts[:1], causal_keys(past[0], rows, window, sinks))


@quick
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(7, 9), windows, sinks_)
def test_rows_padded_on_the_left_count_nothing(padding, rows, window, sinks):
    masks = []
    for pads in padding:
        mask = torch.zeros(rows, rows, dtype=torch.bool)
        mask[pads:, pads:] = request_mask(0, rows - pads, rows - pads, View(True, window, sinks))
        masks.append(mask)
    assert torch.equal(
        causal_keys(-torch.tensor(padding), rows, window, sinks), mask_keys(torch.stack(masks))
    )


@quick
@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 6)), max_size=5),
    st.integers(0, 4),
    views,
    st.sampled_from([torch.int32, torch.int64]),
)
def test_ragged_keys_equal_the_masks(requests, padding, view, dtype):
    starts = [0]
    expected = []
    for past, rows in requests:
        starts.append(starts[-1] + rows)
        expected += mask_keys(request_mask(past, rows, past + rows, view)).tolist()
    total = starts[-1] + padding
    if total == 0:
        return
    counts = ragged_keys(
        torch.tensor(starts, dtype=dtype),
        torch.tensor([past + rows for past, rows in requests], dtype=dtype),
        total,
        causal=view.causal,
        window=view.window,
        sinks=view.sinks,
    )
    assert counts.dtype == torch.int64
    assert counts.tolist() == expected + [0] * padding


def test_ragged_keys_of_a_mixed_batch():
    # A decode row over 9 Keys, a three-row prefill, a request without rows, and two padding rows.
    start, total = (
        torch.tensor([0, 1, 4, 4], dtype=torch.int32),
        torch.tensor([9, 3, 5], dtype=torch.int32),
    )
    assert ragged_keys(start, total, 6, causal=True).tolist() == [9, 1, 2, 3, 0, 0]
    assert ragged_keys(start, total, 6, causal=False).tolist() == [9, 3, 3, 3, 0, 0]
    assert ragged_keys(start, total, 6, causal=False, window=2).tolist() == [2, 2, 3, 2, 0, 0]
    assert ragged_keys(start, total, 6, causal=True, window=2, sinks=1).tolist() == [
        3,
        1,
        2,
        3,
        0,
        0,
    ]


@quick
@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 4), st.booleans())
def test_visible_keys_are_those_of_an_attention_call(row, rows, causal):
    keys = len(row)
    query, key = torch.empty(2, 3, rows, 4), torch.empty(2, 1, keys, 4)
    mask = torch.tensor([row] * rows)
    assert visible_keys(query, key, mask).tolist() == [[[sum(row)] * rows]]
    assert visible_keys(query, key, mask[:, :1]).tolist() == [[[keys * row[0]] * rows]]
    seen = visible_keys(query, key, causal=causal)
    expected = [min(i + 1, keys) if causal else keys for i in range(rows)]
    assert seen.shape[:-1] == (1, 1) and seen.expand(1, 1, rows).tolist() == [[expected]]


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5))
@quick
def test_mask_keys_counts_what_is_visible(rows):
    mask = torch.tensor(rows)
    expected = [sum(row) for row in rows]
    assert mask_keys(mask).tolist() == expected
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for hidden in (float("-inf"), torch.finfo(dtype).min):
            additive = torch.where(
                mask, torch.tensor(-3.5, dtype=dtype), torch.tensor(hidden, dtype=dtype)
            )
            assert mask_keys(additive).tolist() == expected


def test_mask_keys_keeps_leading_dimensions():
    counts = mask_keys(torch.ones(2, 1, 3, 5, dtype=torch.bool))
    assert counts.shape == (2, 1, 3)
    assert counts.dtype == torch.int64
    assert (counts == 5).all()


def test_no_value_is_read_on_the_host():
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    for counts, shape in [
        (block_keys(lengths, 4, 8, 2), (2, 4)),
        (causal_keys(lengths, 4, 8, 2), (2, 4)),
        (ragged_keys(starts, lengths, 7, causal=False, window=8, sinks=2), (7,)),
        (View(True, 8, 2).count(lengths[:1], 4), (4,)),
        (mask_keys(torch.empty(2, 3, 5, device="meta")), (2, 3)),
    ]:
        assert counts.device.type == "meta"
        assert counts.shape == shape
        assert counts.dtype == torch.int64


def test_compiles_to_one_graph():
    def counts(starts, totals, row_values):
        return ragged_keys(starts, totals, row_values.shape[0], causal=True, window=5)

    compiled = torch.compile(counts, fullgraph=True, backend="eager", dynamic=True)
    starts, totals = torch.tensor([0, 1, 4]), torch.tensor([9, 3])
    for rows in (4, 6):
        assert compiled(starts, totals, torch.empty(rows)).tolist() == [5, 1, 2, 3] + [0] * (
            rows - 4
        )


def lengths() -> torch.Tensor:
    return torch.tensor([3, 4])


def starts() -> torch.Tensor:
    return torch.tensor([0, 1, 4])


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: block_keys(-1, 4), ValueError, "context must not be negative, got -1"),
        (lambda: block_keys(4, 0), ValueError, "block must be at least 1, got 0"),
        (lambda: block_keys(4, 4, window=0), ValueError, "window must be at least 1, got 0"),
        (lambda: block_keys(4, 4, 5, -1), ValueError, "sinks must not be negative, got -1"),
        (
            lambda: block_keys(lengths().float(), 4),
            TypeError,
            "context must be of an integer dtype",
        ),
        (lambda: block_keys(lengths() > 3, 4), TypeError, "context must be of an integer dtype"),
        (lambda: block_keys(lengths()[:, None], 4), ValueError, r"context must be \[batch\]"),
        (lambda: causal_keys(-2, 4), ValueError, "past must not be negative"),
        (lambda: causal_keys(2, 0), ValueError, "rows must be at least 1"),
        (lambda: causal_keys(2, 1, window=-1), ValueError, "window must be at least 1"),
        (lambda: causal_keys(lengths()[0], 4), ValueError, r"past must be \[batch\]"),
        (
            lambda: ragged_keys(starts(), lengths(), 0, causal=True),
            ValueError,
            "rows must be at least 1",
        ),
        (
            lambda: ragged_keys(starts(), lengths(), 4, causal=True, window=0),
            ValueError,
            "window must be at least 1",
        ),
        (lambda: ragged_keys(lengths(), lengths(), 4, causal=True), ValueError, r"\[batch \+ 1\]"),
        (
            lambda: ragged_keys(starts()[None], lengths(), 4, causal=True),
            ValueError,
            r"\[batch \+ 1\]",
        ),
        (
            lambda: ragged_keys(starts().float(), lengths(), 4, causal=True),
            TypeError,
            "query_start must be",
        ),
        (
            lambda: ragged_keys(starts(), lengths().float(), 4, causal=True),
            TypeError,
            "total_keys must be",
        ),
        (lambda: mask_keys(torch.ones(2, 3, dtype=torch.int64)), TypeError, r"mask\.bool\(\)"),
    ],
)
def test_refuses(call, error, says):
    with pytest.raises(error, match=says):
        call()
