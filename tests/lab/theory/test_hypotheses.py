"""Counterexamples to Proposition 1 without noise, and the sentences around it, against scipy."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from acmoe.lab.theory.gaussians import agreement, both_above, simpson
from acmoe.lab.theory.robustness.assigned import check_assigned_cluster
from acmoe.lab.theory.robustness.hypotheses import (
    check_correlated,
    check_three_clusters,
    three_cluster_error,
)
from acmoe.lab.theory.robustness.rates import check_exponential
from acmoe.lab.theory.scale import exact_scale, library_scale
from acmoe.lab.theory.weights.harmonic import check_harmonic_mean, weight_ratios


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("a", "b", "r"),
    [
        (1, 1, 0.5),
        (-1.3, 0.2, -0.8),
        (0, 0, 0.99),
        (3, -2, 0),
        (1, 1, 0.999999),
        (1, 1.01, 0.99999),
        (-2, 0.5, -0.99999),
    ],
)
def test_two_correlated_normals_exceed_their_bounds_as_scipy_says(a, b, r):
    wanted = multivariate_normal([0, 0], [[1, r], [r, 1]]).cdf([-a, -b])
    assert both_above(a, b, r) == pytest.approx(wanted, abs=1e-7)


def test_two_orthants_with_mean_zero_are_the_arc_sine_law():
    # P(X > 0, Y > 0) = 1/4 + asin(r) / (2 pi).
    assert both_above(0, 0, 0.5) == pytest.approx(1 / 4 + 1 / 12, rel=1e-12)
    rules = ((tensor(1.0, 0.0), tensor(0.0)), (tensor(0.5, 0.75**0.5), tensor(0.0)))
    both = agreement(torch.zeros(2).double(), torch.eye(2).double(), *rules)
    assert both == pytest.approx((1 / 3, 1 / 3), rel=1e-12)


def test_simpson_is_exact_for_cubics():
    x = torch.linspace(0, 2, 5, dtype=torch.float64)
    assert simpson(x**3, 0.5).item() == pytest.approx(4.0, rel=1e-14)


def test_correlated_features_and_a_third_cluster_contradict_the_proposition():
    correlated, three = check_correlated(0), check_three_clusters(0)
    for row in (correlated, three):
        assert row.confirmed and row.holds_as_printed is False
    assert correlated.figures["plain"] == pytest.approx(0.038, abs=5e-4)
    assert correlated.figures["adaptive"] == pytest.approx(0.185, abs=5e-4)
    assert three.figures["plain"] == pytest.approx(0.404, abs=1e-3)
    assert three.figures["adaptive"] == pytest.approx(0.422, abs=1e-3)


def test_the_error_against_two_clusters_is_that_of_counted_tokens():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400_000, 3)) * [1.6, 1, 1]
    for scale in (np.ones(3), 1 / np.array([1.6, 1, 1])):
        own, *others = (
            ((x - gap) ** 2 * scale).sum(-1) for gap in ([0, 0, 0], [1, 1, 0], [1, 0, 1])
        )
        wrong = (own > np.minimum(*others)).mean()
        found, _ = three_cluster_error(tensor(*scale))
        assert found == pytest.approx(wrong, abs=4.5 * (0.25 / len(x)) ** 0.5)


def test_in_the_ideal_case_the_distance_grows_and_the_error_stays():
    row = check_exponential(0)
    assert row.confirmed and row.holds_as_printed is False
    assert row.figures["lemma_1_gain"] == pytest.approx(1.6)
    assert row.figures["error_ratio"] == pytest.approx(1.0, abs=1e-12)
    rates = [abs(rate - row.figures["limit"]) for rate in row.figures["rates"]]
    assert rates == sorted(rates, reverse=True)


def test_one_lambda_serves_one_cluster():
    assert check_harmonic_mean(0).confirmed
    # lambda = 3 is the harmonic mean of (2, 6), which then has 1/s, and (1, 3) has not.
    ratios = weight_ratios(3.0)
    assert ratios[1] == pytest.approx(3.0) and ratios[0] < 2.5


def test_the_scale_of_the_assigned_cluster_errs_more_than_none():
    row = check_assigned_cluster(0)
    assert row.confirmed and row.holds_as_printed is None
    figures = row.figures
    assert figures["true_cluster_rate"] < figures["plain_rate"] < figures["assigned_cluster_rate"]


def test_the_librarys_scale_of_exact_deviations_is_the_exact_one():
    std_CD = tensor([0.25, 1.0, 3.0], [1.0, 1.0, 1.0])
    torch.testing.assert_close(library_scale(std_CD), exact_scale(std_CD))
    variance_CD = library_scale(std_CD, measure="variance")
    torch.testing.assert_close(variance_CD, exact_scale(std_CD, 2.0))
