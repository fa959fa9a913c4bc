"""Attention against its definition, whole and in chunks, and what rows see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharpdraft.decode.session import Session
from sharpdraft.drafters.dflash import DFlash
from sharpdraft.method.policies import FixedSlope
from sharpdraft.method.visible import View
from sharpdraft.model import attention
from sharpdraft.model.attention import additive, attend
from support.dflash import FULL, SLIDING, WINDOW
from support.drafters import drafter_config, drafter_tensors, propose
from support.tiny import BLOCK, VOCAB, Tiny
from support.views import check_count


@settings(max_examples=300, deadline=None)
@given(
    st.booleans(),
    st.none() | st.integers(1, 40),
    st.integers(0, 60),
    st.integers(1, 20),
)
def test_count_is_the_masks(causal: bool, window: int | None, context: int, rows: int) -> None:
    kind = View(causal, window)
    check_count(kind, context, rows)
    mask = kind.mask(context, rows, torch.device("cpu"))
    for i in range(rows):
        for key in range(context + rows):
            at = context + i
            visible = (key <= at or not causal) and (window is None or abs(at - key) < window)
            assert visible if mask is None else bool(mask[i, key]) == visible


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.integers(1, 5),
    st.integers(0, 9),
    st.booleans(),
)
def test_attend(batch: int, heads: tuple[int, int], rows: int, past: int, as_bool: bool) -> None:
    """Causal rows behind cached Keys, against the attention of the textbook."""
    torch.manual_seed(batch + rows + past)
    query = torch.randn(batch, heads[0], rows, 8)
    keys, values = torch.randn(2, batch, heads[1], past + rows, 8)
    visible = torch.tensor(
        [[key <= past + row for key in range(past + rows)] for row in range(rows)]
    )
    mask = visible if as_bool else additive(visible, torch.float32)
    scores = query @ keys.repeat_interleave(heads[0] // heads[1], 1).transpose(2, 3) / 8**0.5
    shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    mixed = shares @ values.repeat_interleave(heads[0] // heads[1], 1)
    expected = mixed.transpose(1, 2).reshape(batch, rows, -1)
    torch.testing.assert_close(attend(query, keys, values, mask), expected, rtol=1e-4, atol=1e-5)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from([(4, 4), (4, 2), (6, 1), (9, 3)]),
    st.integers(1, 5),
    st.integers(8, 40),
    st.sampled_from([2, 3, 7]),
    st.sampled_from(["none", "bool", "additive"]),
)
def test_attention_in_chunks_is_attention(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    rows: int,
    past: int,
    threads: int,
    kind: str,
) -> None:
    """However the Keys are divided among threads, with a rest or without."""
    monkeypatch.setattr(attention, "_CHUNKED_FROM", 8)
    torch.manual_seed(rows + past)
    query = torch.randn(1, heads[0], rows, 8)
    keys, values = torch.randn(2, 1, heads[1], past + rows, 8)
    visible = torch.ones(rows, past + rows, dtype=torch.bool).tril(past)
    masks = {"none": None, "bool": visible, "additive": additive(visible, torch.float32)}
    mask = masks[kind]
    calls: list[int] = []
    real = attention._attend_in_chunks
    with monkeypatch.context() as patch, torch.inference_mode():
        expected = attend(query, keys, values, mask)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        patch.setattr(attention, "_attend_in_chunks", lambda *a: calls.append(a[-1]) or real(*a))
        found = attend(query, keys, values, mask, past)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    even = heads[1] % threads == 0
    assert bool(calls) != even, "work is divided where heads are not"


def test_keys_that_a_mask_hides_are_never_taken_for_visible(
    llama: Tiny, without_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows hide Keys that were cached long ago: drafts are the same, however attention is
    divided."""
    config = drafter_config(layer_types=[FULL, SLIDING], **WINDOW)
    drafter = DFlash(config, drafter_tensors(config), llama.target)
    assert {view.window for view in drafter.views} == {None, 24}
    rng = torch.Generator().manual_seed(1)
    texts = torch.randint(0, VOCAB, (6, 121), generator=rng).tolist()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    drafts = []
    for chunked in (False, True):
        monkeypatch.setattr(attention, "_CHUNKED_FROM", 8 if chunked else 10**9)
        session = Session(llama.target, drafter)
        for text in texts:
            session.rewind(0)
            session.read(text[:120])
            found = [
                propose(drafter, session.drafts, text[120], BLOCK - 1, p).tolist()
                for p in (None, FixedSlope(33))
            ]
            drafts.append((chunked, found))
    assert [found for chunked, found in drafts if chunked] == [
        found for chunked, found in drafts if not chunked
    ]
