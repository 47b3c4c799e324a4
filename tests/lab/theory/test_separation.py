import pytest
import torch

from acmoe.lab.theory import separation as module
from acmoe.lab.theory.separation import (
    check_separation,
    check_separation_needs_assumption,
    hand_counterexample,
    scale_gap_covariance,
    separation_gain,
)
from acmoe.ops.statistics.scale import cluster_scale


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_gain_weighs_the_squared_gap_by_the_scale():
    # (1.5 * 4 + 0.5 * 1) / (4 + 1)
    assert separation_gain(tensor(1.5, 0.5), tensor(2.0, -1.0)).item() == pytest.approx(1.3)


def test_the_counterexample_shrinks_the_gap_to_a_fifth():
    scale_D, gap_D = hand_counterexample()
    torch.testing.assert_close(scale_D, tensor(1.8, 0.2))
    assert separation_gain(scale_D, gap_D).item() == pytest.approx(0.2)


def test_the_covariance_is_that_of_scale_and_squared_gap():
    # mean(m d^2) - mean(m) mean(d^2) = (1.5 * 4 + 0.5 * 1) / 2 - 1 * 2.5 = 0.75
    assert scale_gap_covariance(tensor(1.5, 0.5), tensor(2.0, -1.0)).item() == pytest.approx(0.75)


def test_lemma_1_holds_where_clusters_are_separated_on_tight_features():
    row = check_separation(0)
    assert row.confirmed and row.holds_as_printed is True
    assert row.verdict == "holds under its assumption" and row.figures["least_gain"] > 1


def test_lemma_1_fails_about_half_the_time_without_its_assumption():
    row = check_separation_needs_assumption(0)
    assert row.confirmed and row.holds_as_printed is None
    assert 0.3 < row.figures["share_that_holds"] < 0.6
    assert row.verdict.startswith("fails without its assumption")


def test_a_scale_that_prefers_loose_features_is_not_confirmed(monkeypatch):
    def inverted(x_TD, cluster_T, count):
        weight_CD = 1 / cluster_scale(x_TD, cluster_T, count)
        return weight_CD / weight_CD.mean(-1, keepdim=True)

    monkeypatch.setattr(module, "cluster_scale", inverted)
    assert not check_separation(0).confirmed
    assert not check_separation_needs_assumption(0).confirmed
