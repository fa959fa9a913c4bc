"""The rules against the paper's check values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpdraft.errors import SharpDraftError
from sharpdraft.method import registry
from sharpdraft.method.policies import REPORTED_SETTINGS, Constant, FixedSlope, LayerSlopes

PAPER = FixedSlope(reference=2048)
quick = settings(max_examples=60, deadline=None)
policies = st.builds(
    lambda k, extra, slope, cap: FixedSlope(k + extra, slope, k, cap),
    st.integers(1, 200),
    st.integers(1, 5000),
    st.floats(0.5, 50),
    st.floats(1, 3),
)


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
    with pytest.raises(SharpDraftError, match=f"scale, kind fixed_slope: .*{says}"):
        registry.from_dict("scale", {"kind": "fixed_slope", **fields})


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan, "1", None])
def test_constant_refuses(scale):
    with pytest.raises(ValueError, match="scale must be a positive finite"):
        Constant(scale)


@quick
@given(policies, st.lists(st.floats(0.5, 50), min_size=1, max_size=5), st.integers(0, 200_000))
def test_slopes_of_layers_are_the_fixed_rule_in_each(policy, slopes, keys):
    layered = LayerSlopes(policy.reference, tuple(slopes), policy.top_k, policy.max_scale)
    assert layered.layers == len(slopes) and layered.needs == ("keys", "layer")
    for layer, slope in enumerate(slopes):
        own = layered.at(layer)
        assert own == FixedSlope(policy.reference, slope, policy.top_k, policy.max_scale)
        expected = beta(own, keys) - 1
        assert own.gain(torch.tensor(keys)).item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert hash(layered) == hash(LayerSlopes(*vars(layered).values()))


def test_slopes_of_layers_have_the_fixed_rules_defaults():
    assert LayerSlopes(512, (5.0,)).at(0) == FixedSlope(512)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"slopes": ()}, r"slopes must name a slope for each layer, got \(\)"),
        ({"slopes": [5.0]}, r"slopes must name a slope for each layer, got \[5.0\]"),
        ({"slopes": 5.0}, "slopes must name a slope for each layer, got 5.0"),
        ({"slopes": (5.0, 0)}, "slope must be a positive finite number, got 0"),
        ({"slopes": (5.0, "x")}, "slope must be a positive finite number, got 'x'"),
        ({"slopes": (5.0,), "reference": 32}, r"reference \(N0\) must be above top_k"),
        ({"slopes": (5.0,), "max_scale": 0.5}, "max_scale must be at least 1"),
        ({"slopes": (5.0,), "top_k": 0}, "top_k must be at least 1"),
    ],
)
def test_slopes_of_layers_refuse(fields, says):
    with pytest.raises(ValueError, match=says):
        LayerSlopes(**{"reference": 512, **fields})


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (FixedSlope(512), "fixed slope: N0 = 512, k = 32, s = 5, cap 1.649"),
        (Constant(1.25), "one scale at every length: 1.25"),
        (
            LayerSlopes(512, (3.0, 4.5)),
            "a slope for each layer: N0 = 512, k = 32, s = 3, 4.5, cap 1.649",
        ),
    ],
)
def test_one_line_for_people(policy, says):
    assert policy.describe() == says


def test_a_reference_within_the_top_group():
    with pytest.raises(ValueError, match=r"reference \(N0\) must be above top_k"):
        FixedSlope(32)


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
