"""The distribution of the scale, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acmoe.analyze.measure.scale import log_distance, measure_scale, two_way


def test_the_identity_is_at_distance_nothing_and_uses_every_feature() -> None:
    found = measure_scale(torch.ones(3, 5))
    assert (found.rms_log, found.std_log) == (0, 0)
    assert (found.feature_share, found.cluster_share, found.own_share) == (0, 0, 0)
    assert found.effective_features == pytest.approx(5)
    assert found.quantiles == (1,) * 7


def test_one_weighting_for_all_clusters_is_the_features_doing() -> None:
    found = measure_scale(torch.tensor([[2.0, 0.5], [2.0, 0.5]]))
    assert found.feature_share == pytest.approx(1)
    assert found.own_share == pytest.approx(0, abs=1e-12)
    assert found.rms_log == pytest.approx(math.log(2))  # every |log M| is log 2
    # (2 + 1/2)^2 / (4 + 1/4) = 6.25 / 4.25 features.
    assert found.effective_features == pytest.approx(6.25 / 4.25)
    assert found.stretched[0] == (0, pytest.approx(2.0))


def test_opposite_weightings_are_each_clusters_own() -> None:
    found = measure_scale(torch.tensor([[2.0, 0.5], [0.5, 2.0]]))
    assert found.own_share == pytest.approx(1)
    assert found.feature_share == pytest.approx(0, abs=1e-12)
    # Both features have geometric mean 1; the one of the lower number stands first.
    assert [feature for feature, _ in found.stretched] == [0, 1]
    assert [mean for _, mean in found.stretched] == pytest.approx([1, 1])


def test_one_factor_per_cluster_is_the_clusters_doing() -> None:
    found = measure_scale(torch.tensor([[2.0, 2.0], [0.5, 0.5]]))
    assert found.cluster_share == pytest.approx(1)


def test_shares_of_a_table_by_hand() -> None:
    # Mean 0; columns (1, -1), rows (2, -2); what is left is 3 * [[1, -1], [-1, 1]].
    # Squares 1, 4 and 9 of 14.
    value_CD = torch.tensor([[6.0, -2.0], [-4.0, 0.0]], dtype=torch.float64)
    assert two_way(value_CD) == pytest.approx((1 / 14, 4 / 14, 9 / 14))


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(2, 6))
def test_the_three_shares_add_up_to_one(seed: int, clusters: int, features: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale_CD = torch.rand(clusters, features, generator=generator) + 0.1
    found = measure_scale(scale_CD)
    total = found.feature_share + found.cluster_share + found.own_share
    assert total == pytest.approx(1)


def test_a_zero_of_a_random_scale_keeps_figures_finite() -> None:
    assert math.isfinite(measure_scale(torch.tensor([[0.0, 2.0]])).rms_log)


def test_the_distance_of_two_scales_by_hand() -> None:
    # log ratios log 2 and 0: sqrt((log 2)^2 / 2).
    found = log_distance(torch.tensor([[2.0, 3.0]]), torch.tensor([[1.0, 3.0]]))
    assert found == pytest.approx(math.log(2) / math.sqrt(2))
