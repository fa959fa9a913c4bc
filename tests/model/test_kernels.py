"""The compiled kernels against the PyTorch operations that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharpdraft.method.visible import View
from sharpdraft.model import kernels
from sharpdraft.model.kernels import add_norm, build, gated, library
from sharpdraft.model.linear import Linear
from support.kernels import WIDTHS, both_ways


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("width", WIDTHS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1), (9, 3)]),
    vectors=st.integers(1, 9),
    spans=st.lists(st.tuples(st.integers(0, 330), st.integers(1, 70)), min_size=1, max_size=4),
    batch=st.integers(1, 3),
    view=st.builds(
        View,
        st.booleans(),
        st.sampled_from([None, 1, 2, 7, 64, 65, 130]),
        st.sampled_from([0, 1, 4, 63, 64, 100, 300]),
    ),
    scaled=st.booleans(),
    normed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_is_pytorchs(
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    heads: tuple[int, int],
    vectors: int,
    spans: list[tuple[int, int]],
    batch: int,
    view: View,
    scaled: bool,
    normed: bool,
    seed: int,
) -> None:
    """Any number of requests at any length, whatever they see; and what is cached."""
    batch = batch if len(spans) == 1 else 1
    ours, theirs = both_ways(
        monkeypatch, width, heads, width * vectors, spans, batch, view, scaled, normed, seed
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert not ours[0].isnan().any()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("off", [1, -1])
def test_a_row_that_sees_another_key_is_noticed(monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    """What the test above would say if a position were off by one."""
    right = kernels.requests

    def wrong(caches: Any, starts: Any, counts: Any) -> Any:
        found = right(caches, starts, counts)
        for each in found or ():
            each.start += off
        return found

    monkeypatch.setattr(kernels, "requests", wrong)
    ours, theirs = both_ways(monkeypatch, 8, (4, 2), 16, [(100, 3)])
    assert not torch.allclose(ours[0], theirs[0], rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("width", WIDTHS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(1, 4), min_size=0, max_size=1),
    st.integers(1, 40),
    st.one_of(st.integers(1, 90), st.sampled_from([512, 600, 1100])),
    st.one_of(st.integers(1, 140), st.just(577)),
    st.booleans(),
    st.booleans(),
)
def test_linear(
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    lead: list[int],
    rows: int,
    size: int,
    outs: int,
    narrow: bool,
    biased: bool,
) -> None:
    """Any number of rows, inputs and outputs, few enough for one thread and more; a row is to the
    bit the same whatever rows it comes with."""
    torch.manual_seed(rows + size + outs)
    x, weight = torch.randn(*lead, rows, size), torch.randn(outs, size)
    weight = weight.bfloat16().float() if narrow else weight
    bias = torch.randn(outs) if biased else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    layer = Linear(weight, bias)
    assert layer.panels is not None and torch.equal(layer.weight, weight)
    assert layer.panels.dtype == (
        torch.bfloat16 if torch.equal(weight.bfloat16().float(), weight) else torch.float32
    )
    with monkeypatch.context() as patch:
        patch.setattr(build, "widest", lambda: library(width))
        found, first = layer(x), layer(x[..., :1, :])
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(first, found[..., :1, :])


@pytest.mark.usefixtures("compiled")
def test_weights_that_bfloat16_holds_are_kept_as_such_and_no_weight_twice() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 32)
    for exact in (True, False):
        layer = Linear(weight.bfloat16().float() if exact else weight)
        kept = [each for each in vars(layer).values() if isinstance(each, Tensor)]
        assert sum(each.nbytes for each in kept) == 64 * 32 * (2 if exact else 4)


@pytest.mark.usefixtures("compiled")
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 70), st.booleans(), st.sampled_from([1e-6, 1.0, 30.0, 1e4])
)
def test_add_norm_and_gated(rows: int, size: int, added: bool, scale: float) -> None:
    torch.manual_seed(rows + size)
    hidden, weight = torch.randn(1, rows, size) * scale, torch.randn(size)
    delta = torch.randn(1, rows, size) * scale if added else None
    total = hidden if delta is None else hidden + delta
    expected = F.rms_norm(total.double(), (size,), weight.double(), 1e-5).float()
    summed, normed = add_norm(hidden.clone(), delta, weight, 1e-5)
    torch.testing.assert_close(summed, total)
    torch.testing.assert_close(normed, expected, rtol=1e-4, atol=1e-6)
    both = torch.randn(1, rows, 2 * size) * scale
    gate, up = both.double().chunk(2, -1)
    torch.testing.assert_close(gated(both), (F.silu(gate) * up).float(), rtol=1e-4, atol=1e-6)


def test_gradients_are_left_to_pytorch() -> None:
    """Training runs the same functions."""
    with torch.inference_mode(False), torch.enable_grad():
        x, norm = torch.randn(2, 16, requires_grad=True), torch.ones(16)
        weight = torch.randn(8, 16)
        torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight))
        hidden, normed = add_norm(x, x, norm, 1e-5)
        (hidden.sum() + normed.sum() + gated(x).sum() + Linear(weight)(x).sum()).backward()
        assert x.grad is not None
