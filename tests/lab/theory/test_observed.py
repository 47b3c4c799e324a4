"""T tokens, C clusters and as many experts."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from acmoe.data.synthetic import GaussianClusters
from acmoe.evaluate.measures import instability
from acmoe.lab.theory.repeats import observed as module
from acmoe.lab.theory.repeats.observed import (
    CONTRASTS,
    adjusted_rand,
    check_repeated,
    confirmation_sweep,
    expected_told,
)

FEW = 20_000


def test_for_two_clusters_the_error_of_the_told_rule_is_the_tail_of_one_normal():
    clusters = GaussianClusters(num_clusters=2, dim=8, contrast=2.0, separation=2.0)
    told = norm.sf(2 * np.sqrt(2) / np.sqrt(4 * 0.25 + 1))
    assert expected_told(clusters) == pytest.approx(told, rel=1e-9)


@pytest.mark.parametrize("rate", [0.0, 0.04, 0.3, 0.75])
def test_the_index_of_a_rate_is_the_adjusted_rand_index_of_symmetric_errors(rate):
    wrong = round(100_000 * rate)
    table_CE = torch.full((4, 4), wrong)
    table_CE.fill_diagonal_(300_000 - 3 * wrong)
    assert adjusted_rand(rate, 4) == pytest.approx(instability(table_CE).adjusted_rand, abs=1e-5)


@pytest.fixture(scope="module")
def points():
    return confirmation_sweep(0, FEW)


def test_wrong_choices_are_repeated_at_every_contrast(points):
    assert [point.contrast for point in points] == list(CONTRASTS)
    for point in points:
        assert point.wrong["plain"] == point.counted[0] > 500
        shares = [a / b for a, b in zip(point.repeated, point.counted, strict=True)]
        assert min(shares) > 0.995
        assert abs(point.wrong["adaptive"] - point.wrong["plain"]) <= 0.001 * FEW


def test_a_distance_in_the_metric_of_the_choice_repeats_it_too(points):
    for point in points:
        assert abs(point.wrong["distance"] - point.wrong["plain"]) <= 0.002 * FEW


def test_own_metrics_mend_the_choices_that_the_adaptive_rule_repeats(points):
    for point in points[1:]:
        assert point.wrong["own_metric"] < 0.5 * point.wrong["adaptive"]
        assert point.wrong["bayes"] <= point.wrong["own_metric"] + 0.002 * FEW


def test_the_row_is_an_observation_and_other_seeds_give_other_counts(points, monkeypatch):
    monkeypatch.setattr(module, "confirmation_sweep", lambda seed, tokens: points)
    row = check_repeated(0, FEW)
    assert row.confirmed and row.basis == "observation" and row.verdict.startswith("observed")
    rates, index = row.figures["plain_rate"], row.figures["plain_ari"]
    assert index == [adjusted_rand(rate, 4) for rate in rates]
    assert points[2].wrong != confirmation_sweep(1, FEW, (8.0,))[0].wrong


def test_own_metrics_that_bring_nothing_are_not_confirmed(points, monkeypatch):
    monkeypatch.setattr(module, "own_metric_choice", lambda x_TD, assignment_T, count: assignment_T)
    assert not check_repeated(0, FEW).confirmed
