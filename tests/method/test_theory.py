"""The theory against sums written out in plain Python, and the statements the paper makes about
it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpdraft.method.theory import competitors, contrast, contrast_derivative, top_mass

quick = settings(max_examples=60, deadline=None)
values = st.floats(-8, 8, allow_subnormal=False)
betas = st.floats(0.3, 3)


@st.composite
def rows(draw, separated: bool = False):
    """Scores of one row, k below their number, and with `separated` a gap between the top k and the
    rest."""
    scores = sorted(draw(st.lists(values, min_size=2, max_size=30)), reverse=True)
    k = draw(st.integers(1, len(scores) - 1))
    if separated:
        scores = [z + 0.05 for z in scores[:k]] + scores[k:]
    return draw(st.permutations(scores)), k


def written_out(scores, k, beta):
    """ρ, F and F' by their definitions."""
    ordered = sorted(scores, reverse=True)
    top, rest = ordered[:k], ordered[k:]
    weight = {
        group: [math.exp(beta * z) for z in part] for group, part in (("top", top), ("rest", rest))
    }
    mass = sum(weight["top"]) / (sum(weight["top"]) + sum(weight["rest"]))
    f = math.log(sum(weight["top"]) / k) - math.log(sum(weight["rest"]) / len(rest))
    mean = [
        sum(w * z for w, z in zip(weight[group], part, strict=True)) / sum(weight[group])
        for group, part in (("top", top), ("rest", rest))
    ]
    return mass, f, mean[0] - mean[1]


def double(scores) -> torch.Tensor:
    return torch.tensor(scores, dtype=torch.float64)


@quick
@given(rows(), betas)
def test_equals_the_definitions(row, beta):
    scores, k = row
    mass, f, derivative = written_out(scores, k, beta)
    assert top_mass(double(scores), k, beta).item() == pytest.approx(mass, abs=1e-12)
    assert contrast(double(scores), k, beta).item() == pytest.approx(f, abs=1e-10)
    assert contrast_derivative(double(scores), k, beta).item() == pytest.approx(
        derivative, abs=1e-10
    )


def test_known_row():
    # Weights 4, 2 | 1, 1: the top two hold 6 of 8.
    scores = double([0.0, math.log(4), 0.0, math.log(2)])
    assert top_mass(scores, 2).item() == pytest.approx(0.75)
    assert contrast(scores, 2).item() == pytest.approx(math.log(3))
    assert contrast_derivative(scores, 2).item() == pytest.approx(
        (4 * math.log(4) + 2 * math.log(2)) / 6
    )


@quick
@given(rows(), betas)
def test_partition_identity(row, beta):
    scores, k = row
    rho = top_mass(double(scores), k, beta)
    identity = contrast(double(scores), k, beta) - math.log(competitors(len(scores), k))
    # logit loses as many digits as 1 - rho has leading zeros, so it is compared where rho still
    # shows them.
    if rho < 1 - 1e-6:
        torch.testing.assert_close(rho.logit(), identity, rtol=0, atol=1e-8)
    torch.testing.assert_close(rho, identity.sigmoid(), rtol=1e-12, atol=0)


@quick
@given(rows(separated=True), betas, st.floats(0.01, 1))
def test_contrast_rises_under_strict_separation(row, beta, more):
    scores, k = row
    assert contrast(double(scores), k, beta + more) > contrast(double(scores), k, beta)
    assert contrast_derivative(double(scores), k, beta) > 0


@quick
@given(rows(), betas)
def test_derivative_is_the_slope_of_the_contrast(row, beta):
    scores, k = row
    h = 1e-5
    slope = (contrast(double(scores), k, beta + h) - contrast(double(scores), k, beta - h)) / (
        2 * h
    )
    torch.testing.assert_close(
        contrast_derivative(double(scores), k, beta), slope, rtol=1e-6, atol=1e-6
    )


@quick
@given(rows(), st.floats(0, 4))
def test_contrast_error_moves_the_mass_by_a_quarter_at_most(row, error):
    scores, k = row
    before = double(scores).sort(descending=True).values
    after = before.clone()
    after[:k] += error
    assert (contrast(after, k) - contrast(before, k)).item() == pytest.approx(error, abs=1e-9)
    assert (top_mass(after, k) - top_mass(before, k)).item() <= error / 4 + 1e-12


def test_the_quarter_is_tight_at_even_odds():
    change = top_mass(double([1e-3, 0.0]), 1) - top_mass(double([0.0, 0.0]), 1)
    assert change.item() == pytest.approx(1e-3 / 4, rel=1e-5)


@quick
@given(rows(), betas)
def test_twice_the_competitors_halve_the_odds(row, beta):
    scores, k = row
    ordered = double(scores).sort(descending=True).values
    doubled = torch.cat([ordered, ordered[k:]])
    torch.testing.assert_close(
        contrast(doubled, k, beta), contrast(ordered, k, beta), rtol=0, atol=1e-9
    )
    odds = [top_mass(z, k, beta) / (1 - top_mass(z, k, beta)) for z in (ordered, doubled)]
    if odds[0] < 1e6:
        torch.testing.assert_close(odds[1], odds[0] / 2, rtol=1e-8, atol=0)


@quick
@given(rows(), betas, st.integers(1, 5))
def test_masked_positions_are_no_keys(row, beta, masked):
    scores, k = row
    for hidden in (
        double([-math.inf] * masked + list(scores)),
        double(list(scores) + [-math.inf] * masked),
    ):
        for measure in (top_mass, contrast, contrast_derivative):
            expected = measure(double(scores), k, beta)
            torch.testing.assert_close(measure(hidden, k, beta), expected, rtol=1e-10, atol=1e-10)


def test_rows_left_without_a_rest():
    inf = math.inf
    scores = torch.tensor(
        [[2.0, 1.0, -inf, -inf], [2.0, -inf, -inf, -inf], [-inf] * 4, [3.0, 2.0, 1.0, 0.0]]
    )
    mass = top_mass(scores, 2)
    assert mass[:2].tolist() == [1, 1]
    assert mass[2].isnan()
    assert mass[3] < 1
    for measure in (contrast, contrast_derivative):
        assert measure(scores, 2).isnan().tolist() == [True, True, True, False]
    assert top_mass(torch.randn(3, 4), 4).tolist() == [1, 1, 1]
    assert top_mass(torch.randn(3, 4), 9).tolist() == [1, 1, 1]


def test_scores_far_apart_stay_finite():
    scores = torch.tensor([3000.0, 2990.0, -3000.0, -3010.0])
    assert contrast(scores, 2, 2.0).item() == pytest.approx(12_000, rel=1e-6)
    assert contrast_derivative(scores, 2).item() == pytest.approx(6000, rel=1e-6)
    assert top_mass(scores, 2).item() == 1
    assert top_mass(scores - 1e4, 1).item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("measure", [top_mass, contrast, contrast_derivative])
def test_shapes_dtypes_and_broadcast_scales(measure):
    torch.manual_seed(0)
    scores = torch.randn(3, 5, 40)
    assert measure(scores, 4).shape == (3, 5)
    assert measure(scores, 4).dtype == torch.float32
    assert measure(scores.double(), 4).dtype == torch.float64
    for half in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(measure(scores.to(half), 4), measure(scores.to(half).float(), 4))
    betas = torch.tensor([0.5, 1.0, 2.0])
    per_row = measure(scores, 4, betas[:, None])
    curve = measure(scores, 4, betas.double()[:, None, None])
    assert per_row.shape == (3, 5)
    assert curve.shape == (3, 3, 5)
    for i, beta in enumerate(betas.tolist()):
        torch.testing.assert_close(per_row[i], measure(scores, 4, beta)[i])
        torch.testing.assert_close(curve[i], measure(scores, 4, beta))


def test_competitors():
    assert competitors(2048, 32) == 63
    assert competitors(32, 32) == 0
    assert competitors(torch.tensor([64, 2048]), 32).tolist() == [1, 63]


@pytest.mark.parametrize("measure", [top_mass, contrast, contrast_derivative])
@pytest.mark.parametrize(
    ("scores", "k", "beta", "error", "says"),
    [
        (torch.ones(4, dtype=torch.int64), 1, 1.0, TypeError, "scores must be floating"),
        (torch.ones(3, 0), 1, 1.0, ValueError, "at least one Key"),
        (torch.tensor(1.0), 1, 1.0, ValueError, "at least one Key"),
        (torch.ones(4), 0, 1.0, ValueError, "k must be at least 1, got 0"),
        (torch.ones(4), 1, 0.0, ValueError, "beta must be positive"),
        (torch.ones(4), 1, -1.0, ValueError, "beta must be positive"),
        (torch.ones(4), 1, math.inf, ValueError, "beta must be positive"),
        (torch.ones(4), 1, math.nan, ValueError, "beta must be positive"),
    ],
)
def test_refuses(measure, scores, k, beta, error, says):
    with pytest.raises(error, match=says):
        measure(scores, k, beta)


@pytest.mark.parametrize("measure", [contrast, contrast_derivative])
@pytest.mark.parametrize("k", [4, 5])
def test_contrast_refuses_a_row_that_is_all_top(measure, k):
    with pytest.raises(ValueError, match=f"k={k} of 4 Keys leaves none"):
        measure(torch.ones(4), k)


def test_competitors_refuses():
    with pytest.raises(ValueError, match="no top group of 32"):
        competitors(31, 32)
    with pytest.raises(ValueError, match="k must be at least 1"):
        competitors(31, 0)
