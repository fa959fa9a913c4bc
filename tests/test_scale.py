"""The fixed-slope rule against the paper's check values, and the arithmetic of scaling a Query to
the bit."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpdraft.method.policies import REPORTED_SETTINGS, Constant, FixedSlope
from sharpdraft.method.scale import Policy, policy_from_settings, policy_to_settings, scale_queries

PAPER = FixedSlope(reference=2048)
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
DTYPES = list(BITS)
quick = settings(max_examples=60, deadline=None)
policies = st.builds(
    lambda k, extra, slope, cap: FixedSlope(k + extra, slope, k, cap),
    st.integers(1, 200),
    st.integers(1, 5000),
    st.floats(0.5, 50),
    st.floats(1, 3),
)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(BITS[x.dtype])


def beta(policy: FixedSlope, n: int) -> float:
    """The paper's formula as it is printed, in double precision."""
    r = max((n - policy.top_k) / (policy.reference - policy.top_k), 1)
    return min(policy.max_scale, 1 + math.log(r) / policy.slope)


def test_scale_is_one_up_to_the_reference_and_not_beyond():
    counts = torch.tensor([0, 1, 31, 32, 33, 1024, 2047, 2048])
    assert (PAPER.gain(counts) == 0).all()
    assert (PAPER.scale(counts) == 1).all()
    assert PAPER.gain(torch.tensor([2049])).item() == pytest.approx(
        math.log1p(1 / 2016) / 5, rel=1e-6
    )


def test_paper_check_values():
    assert PAPER.scale(torch.tensor(16_416)).item() == pytest.approx(
        1 + math.log(16384 / 2016) / 5, rel=1e-6
    )
    assert PAPER.scale(torch.tensor(16_416)).item() == pytest.approx(1.42, abs=0.005)
    below, above, far = PAPER.scale(torch.tensor([51_600, 51_700, 10**9])).tolist()
    assert below < above == far == pytest.approx(math.exp(0.5), rel=1e-6)


def test_reference_is_exact_for_counts_that_float32_cannot_tell_apart():
    policy = FixedSlope(reference=2**24)
    assert policy.gain(torch.tensor([2**24])).item() == 0
    assert policy.gain(torch.tensor([2**24 + 1])).item() > 0


@quick
@given(policies, st.lists(st.integers(0, 200_000), min_size=1, max_size=40))
def test_gain_follows_the_formula_and_rises_with_keys(policy, counts):
    counts = torch.tensor(sorted(counts))
    gain = policy.gain(counts)
    expected = torch.tensor([beta(policy, n) - 1 for n in counts.tolist()])
    torch.testing.assert_close(gain, expected, rtol=1e-5, atol=1e-7)
    assert (gain.diff() >= 0).all()
    assert (gain >= 0).all()
    assert (policy.scale(counts) <= policy.max_scale * (1 + 1e-6)).all()
    assert (gain[counts <= policy.reference] == 0).all()
    assert (gain[counts > policy.reference] > 0).all() or policy.max_scale == 1


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64]
)
def test_gain_keeps_shape_for_every_count_dtype(dtype):
    counts = torch.tensor([[[3, 100, 200]]], dtype=dtype)
    policy = FixedSlope(reference=100, top_k=4)
    gain = policy.gain(counts)
    assert gain.shape == counts.shape
    assert gain.dtype == torch.float32
    assert gain.flatten().tolist() == pytest.approx([0, 0, math.log(196 / 96) / 5], rel=1e-6)
    assert policy.gain(counts[0, 0, 0]).shape == ()


def test_constant_ignores_the_counts():
    gain = Constant(math.exp(0.2)).gain(torch.tensor([[1, 10**6]], dtype=torch.int32))
    assert gain.dtype == torch.float32
    assert gain.tolist() == [[pytest.approx(math.exp(0.2) - 1, rel=1e-6)] * 2]
    assert Constant(0.5).gain(torch.tensor([7])).item() == -0.5


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


@pytest.mark.parametrize("policy", [PAPER, Constant(1.1)])
def test_a_mask_is_not_a_count(policy):
    with pytest.raises(TypeError, match="mask_keys"):
        policy.gain(torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"reference": 32}, r"reference \(N0\) must be above top_k"),
        ({"reference": 5}, "Raise reference"),
        ({"reference": 2048.0}, "reference must be an integer"),
        ({"reference": True}, "reference must be an integer"),
        ({"reference": 2048, "top_k": 0}, "top_k must be at least 1"),
        ({"reference": 2048, "top_k": 1.5}, "top_k must be an integer"),
        ({"reference": 2048, "slope": 0.0}, "slope must be a positive finite"),
        ({"reference": 2048, "slope": -5}, "slope must be a positive finite"),
        ({"reference": 2048, "slope": math.nan}, "slope must be a positive finite"),
        ({"reference": 2048, "slope": math.inf}, "slope must be a positive finite"),
        ({"reference": 2048, "slope": "5"}, "slope must be a positive finite"),
        ({"reference": 2048, "slope": True}, "slope must be a positive finite"),
        ({"reference": 2048, "max_scale": 0.99}, "max_scale must be at least 1"),
        ({"reference": 2048, "max_scale": math.inf}, "max_scale must be a positive finite"),
    ],
)
def test_fixed_slope_refuses(fields, says):
    with pytest.raises(ValueError, match=says):
        FixedSlope(**fields)
    with pytest.raises(ValueError, match=says):
        policy_from_settings({"kind": "fixed_slope", **fields})


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan, "1", None])
def test_constant_refuses(scale):
    with pytest.raises(ValueError, match="scale must be a positive finite"):
        Constant(scale)


@quick
@given(st.one_of(policies, st.builds(Constant, st.floats(0.1, 3))))
def test_settings_survive_json(policy):
    assert policy_from_settings(json.loads(json.dumps(policy_to_settings(policy)))) == policy


def test_settings_as_written():
    assert policy_to_settings(PAPER) == {
        "kind": "fixed_slope",
        "reference": 2048,
        "slope": 5.0,
        "top_k": 32,
        "max_scale": math.exp(0.5),
    }
    assert policy_to_settings(Constant(1.5)) == {"kind": "constant", "scale": 1.5}
    assert policy_from_settings({"kind": "fixed_slope", "reference": 2048}) == PAPER


@pytest.mark.parametrize(
    ("given_settings", "says"),
    [
        ({}, "kind"),
        ([], "mapping"),
        ({"kind": "log_length"}, "fixed_slope, constant"),
        ({"kind": ["constant"], "scale": 1.0}, "fixed_slope, constant"),
        ({"kind": "fixed_slope"}, '"reference"'),
        ({"kind": "constant"}, '"scale"'),
        (
            {"kind": "constant", "scale": 1.0, "slop": 5},
            "unknown constant settings slop: known are scale",
        ),
    ],
)
def test_settings_refused(given_settings, says):
    with pytest.raises(ValueError, match=says):
        policy_from_settings(given_settings)


def test_unknown_policy_is_not_written():
    with pytest.raises(ValueError, match="known kinds are fixed_slope, constant"):
        policy_to_settings(object())


def test_reported_settings():
    assert {name: policy.reference for name, policy in REPORTED_SETTINGS.items()} == {
        "dflash": 2048,
        "dflash-glm": 4096,
        "pard": 8192,
    }
    for policy in REPORTED_SETTINGS.values():
        assert (policy.slope, policy.top_k, policy.max_scale) == (5.0, 32, math.exp(0.5))
    with pytest.raises(TypeError):
        REPORTED_SETTINGS["eagle3"] = PAPER
