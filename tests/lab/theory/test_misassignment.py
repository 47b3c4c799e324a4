import math

import pytest
import torch
from scipy.stats import multivariate_normal, norm

from acmoe.lab.theory.robustness.misassignment import (
    check_misassignment,
    check_misassignment_scope,
    misassignment,
    nearest,
    triangle_error,
)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("gap", "std"), [(2.0, 1.0), (3.0, 0.4), (0.5, 2.0)])
def test_on_one_feature_the_probability_is_the_tail_beyond_the_midpoint(gap, std):
    found = misassignment(tensor(gap), std**2 * torch.eye(1).double(), tensor(1.0))
    assert found.item() == pytest.approx(norm.sf(gap / (2 * std)), rel=1e-12)


def test_a_scale_stretches_signal_and_deviation():
    # gap (1, 1), M = diag(2, 1), Sigma = diag(1, 4): signal 3, deviation sqrt(4 + 4).
    found = misassignment(tensor(1.0, 1.0), torch.diag(tensor(1.0, 4.0)), tensor(2.0, 1.0))
    assert found.item() == pytest.approx(norm.sf(3 / (2 * math.sqrt(8))), rel=1e-12)


def test_a_common_factor_of_the_scale_changes_nothing():
    gap_D, scale_D = tensor(1.0, 0.3), tensor(0.4, 1.6)
    covariance_DD = torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=torch.float64)
    found, scaled = (misassignment(gap_D, covariance_DD, f * scale_D) for f in (1.0, 1e3))
    torch.testing.assert_close(found, scaled)


def test_the_nearest_mean_depends_on_each_tokens_own_scale():
    x_TD = tensor(0.9, 0.0).expand(2, 2)
    means_CD = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    scale_TD = torch.tensor([[1.0, 1.0], [3.0, 1.0]], dtype=torch.float64)
    # Squared distances: 0.81 against 0.01 + 1; then 2.43 against 0.03 + 1.
    assert nearest(x_TD, means_CD, scale_TD).tolist() == [0, 1]
    assert nearest(x_TD, means_CD, scale_TD[0]).tolist() == [0, 0]


def test_lemma_2_holds_for_two_gaussian_clusters_plain_and_scaled():
    row = check_misassignment(0)
    assert row.confirmed and row.holds_as_printed is True
    assert row.figures["outside_interval"] == 0
    assert row.figures["outside_interval_with_unstretched_variance"] >= 6


def test_lemma_2_is_contradicted_by_a_third_cluster_and_by_two_point_noise():
    row = check_misassignment_scope(0)
    assert row.confirmed and row.holds_as_printed is False
    assert row.figures["three_clusters_formula"] == pytest.approx(norm.sf(1))
    # Either of two bisectors at distance 1 is passed; their normals make an angle of 60 degrees.
    both = multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]]).cdf([-1, -1])
    assert triangle_error() == pytest.approx(2 * norm.sf(1) - both, abs=1e-6)
    assert triangle_error() == pytest.approx(0.2548, abs=1e-4)
    assert row.figures["two_point_noise_exact"] == pytest.approx(norm.sf(1) / 2)
    assert row.figures["two_point_noise_formula"] == pytest.approx(norm.sf(1 / math.sqrt(0.82)))
