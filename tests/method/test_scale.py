"""The arithmetic of scaling a Query, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpdraft.method.policies import Constant, FixedSlope
from sharpdraft.method.scale import Policy, scale_queries

PAPER = FixedSlope(reference=2048)
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
DTYPES = list(BITS)
quick = settings(max_examples=60, deadline=None)


def beta(policy: FixedSlope, n: int) -> float:
    """The paper's formula as it is printed, in double precision."""
    r = max((n - policy.top_k) / (policy.reference - policy.top_k), 1)
    return min(policy.max_scale, 1 + math.log(r) / policy.slope)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(BITS[x.dtype])


@pytest.mark.parametrize("policy", [PAPER, Constant(1.25)])
def test_a_policy_reads_no_tensor_value_on_the_host(policy):
    assert isinstance(policy, Policy)
    assert not isinstance(object(), Policy)
    counts = torch.empty(2, 3, dtype=torch.int32, device="meta")
    query = torch.empty(2, 4, 3, 8, dtype=torch.bfloat16, device="meta")
    gain = policy.gain(counts)
    assert gain.device.type == "meta"
    assert scale_queries(query, gain[:, None, :]).shape == query.shape


def test_compiles_to_one_graph_with_the_same_result():
    def apply(query, counts):
        return scale_queries(query, PAPER.gain(counts)[:, None])

    compiled = torch.compile(apply, fullgraph=True, backend="eager", dynamic=True)
    for rows in (3, 5):
        query = torch.randn(rows, 4, 8, dtype=torch.bfloat16)
        counts = torch.arange(rows) * 9000
        assert torch.equal(compiled(query, counts), apply(query, counts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_gain_is_the_identity_to_the_bit(dtype):
    if dtype == torch.float32:
        patterns = torch.cat(
            [torch.arange(-(2**31), 2**31, 65_521), torch.tensor([-(2**31), 0, 1, 1 - 2**31])]
        )
    else:
        patterns = torch.arange(-(2**15), 2**15)
    query = patterns.to(BITS[dtype]).view(dtype)
    query = query[query.isfinite()].unsqueeze(-1)
    assert (query.signbit() & (query == 0)).any()
    assert ((query != 0) & (query.abs() < torch.finfo(dtype).tiny)).any()
    counts = torch.arange(len(query)) % (PAPER.reference + 1)
    assert torch.equal(bits(scale_queries(query, PAPER.gain(counts))), bits(query))


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float32 values rounded to nearest even in another dtype, without torch."""
    if dtype == torch.float16:
        return x.astype(np.float16).astype(np.float32)
    if dtype == torch.bfloat16:
        raw = x.view(np.uint32).astype(np.uint64)
        return ((raw + 0x7FFF + ((raw >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return x


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_in_float32_then_cast_then_added(dtype):
    torch.manual_seed(0)
    query = torch.randn(64, 256).to(dtype)
    gain = torch.rand(64) * 0.65
    q = query.float().numpy()
    product = gain.numpy()[:, None] * q
    expected = rounded(q + rounded(product, dtype), dtype)
    np.testing.assert_array_equal(scale_queries(query, gain).float().numpy(), expected)
    if dtype != torch.float32:
        # The inputs must tell the defined order from its likely mistakes, or this test could not
        # fail.
        low_gain = rounded(gain.numpy(), dtype)[:, None]
        assert (rounded(q + rounded(low_gain * q, dtype), dtype) != expected).any()
        assert (rounded(q + product, dtype) != expected).any()


def test_scale_queries_leaves_its_input_alone_and_passes_gradients():
    query = torch.ones(2, 3, requires_grad=True)
    out = scale_queries(query, torch.tensor([0.5, 0.0]))
    out.sum().backward()
    assert out.tolist() == [[1.5] * 3, [1.0] * 3]
    assert query.tolist() == [[1.0] * 3] * 2
    assert query.grad.tolist() == [[1.5] * 3, [1.0] * 3]


@quick
@given(st.integers(0, 2**31), st.integers(0, 200_000))
def test_order_of_scores_is_kept(seed, count):
    torch.manual_seed(seed)
    query, keys = torch.randn(1, 16), torch.randn(50, 16)
    scaled = scale_queries(query, PAPER.gain(torch.tensor([count])))
    before, after = (query.double() @ keys.double().T)[0], (scaled.double() @ keys.double().T)[0]
    order = before.argsort()
    clear = before[order].diff() > 1e-4
    assert clear.any()
    assert (after[order].diff()[clear] > 0).all()
    torch.testing.assert_close(after, before * beta(PAPER, count), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("query", "gain", "error", "says"),
    [
        (torch.ones(2, 3, dtype=torch.int64), torch.zeros(2), TypeError, "query must be"),
        (torch.ones(2, 3, dtype=torch.float64), torch.zeros(2), TypeError, "query must be"),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.bfloat16), TypeError, "gain must be float32"),
        (torch.ones(2, 3), torch.zeros(3), ValueError, "does not fit"),
        (torch.ones(1, 3), torch.zeros(2), ValueError, "does not fit"),
        (torch.ones(2, 2, 5, 3), torch.zeros(2, 5), ValueError, "one dimension fewer"),
        (torch.ones(3), torch.zeros(3), ValueError, "one dimension fewer"),
        (torch.tensor(1.0), torch.tensor(0.0), ValueError, "one dimension fewer"),
    ],
)
def test_scale_queries_refuses(query, gain, error, says):
    with pytest.raises(error, match=says):
        scale_queries(query, gain)
