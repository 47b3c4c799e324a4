"""T tokens, D features, C clusters and as many experts, E."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from acmoe.data.synthetic import GaussianClusters
from acmoe.evaluate.measures import instability
from acmoe.lab.theory import confirmation as module
from acmoe.lab.theory.confirmation import (
    CONTRASTS,
    adjusted_rand,
    check_confirmation,
    confirmation_sweep,
    expected_negative,
    expected_rate,
    population_scale,
)
from acmoe.lab.theory.misassignment import nearest
from acmoe.lab.theory.rules import adaptive_choice

FEW = 20_000


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(0, 2**31), st.floats(1, 100), st.integers(2, 5), st.integers(1, 4))
def test_a_first_choice_that_is_not_negative_keeps_its_lead_in_its_own_metric(
    seed, boost, count, block
):
    generator = torch.Generator().manual_seed(seed)
    dim = count * block

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    own_ED = torch.arange(dim) // block == torch.arange(count)[:, None]
    part_ED, shared_D, x_TD = normal(count, dim) * own_ED, normal(dim), normal(200, dim)
    scale_CD = torch.where(own_ED, boost, 1.0).double()
    scale_CD /= scale_CD.mean(-1, keepdim=True)
    affinity_T, first_T = (x_TD @ part_ED.T).max(-1)
    again_TE = (x_TD * scale_CD[first_T]) @ (part_ED + shared_D).T
    lead_T = again_TE.gather(1, first_T[:, None])[:, 0] - again_TE.amax(-1)
    assert (affinity_T >= 0).any()
    assert lead_T[affinity_T >= 0].min() > -1e-9


def test_a_negative_first_choice_is_left_in_the_example_by_hand():
    # Affinities (-1, -1.5); scale (1.6, 0.4) of the first makes them (-1.6, -0.6).
    x_TD, embedding_ED = torch.tensor([[-1.0, -1.5]]).double(), torch.eye(2).double()
    scale_CD = torch.tensor([[1.6, 0.4], [0.4, 1.6]], dtype=torch.float64)
    assert adaptive_choice(x_TD, embedding_ED, scale_CD, torch.tensor([0])).tolist() == [1]
    # The same token turned round: (1.5, 1) become (2.4, 0.4).
    turned_TD = torch.tensor([[1.5, 1.0]]).double()
    assert adaptive_choice(turned_TD, embedding_ED, scale_CD, torch.tensor([0])).tolist() == [0]


def test_close_clusters_have_negative_first_choices_and_only_those_leave():
    clusters = GaussianClusters(contrast=2.0, separation=1.0)
    x_TD, _ = clusters.sample(FEW, torch.Generator().manual_seed(0), dtype=torch.float64)
    affinity_T, first_T = (x_TD @ clusters.means.T).max(-1)
    scale_CD = population_scale(clusters.stds)
    leaves_T = adaptive_choice(x_TD, clusters.means, scale_CD, first_T) != first_T
    assert 0 < leaves_T.sum() < (affinity_T < 0).sum()
    assert not (leaves_T & (affinity_T >= 0)).any()


def test_a_nearest_mean_is_left_only_by_tokens_nearer_to_the_origin():
    # Squared distances in M_j differ by -2 m_jk (a_k - u^2 / 2): the same rule, less a bias, which
    # is not negative where the token is at least as near to mean j as to 0.
    clusters = GaussianClusters(contrast=2.0, separation=2.0)
    x_TD, _ = clusters.sample(FEW, torch.Generator().manual_seed(0), dtype=torch.float64)
    first_T = nearest(x_TD, clusters.means, torch.ones(16).double())
    scale_CD = population_scale(clusters.stds)
    leaves_T = nearest(x_TD, clusters.means, scale_CD[first_T]) != first_T
    away_T = (x_TD - clusters.means[first_T]).norm(dim=-1) > x_TD.norm(dim=-1)
    assert 0 < leaves_T.sum() < away_T.sum()
    assert not (leaves_T & ~away_T).any()


def test_for_two_clusters_the_expected_rate_is_the_tail_of_one_normal():
    # u (u + tight z) against u loose z': their difference is N(u, tight^2 + loose^2) in units of u.
    clusters = GaussianClusters(num_clusters=2, dim=8, contrast=2.0, separation=2.0)
    wanted = norm.sf(np.sqrt(2) / np.sqrt(0.25 + 1))
    assert expected_rate(clusters, 1.0) == pytest.approx(wanted, rel=1e-9)
    told = norm.sf(2 * np.sqrt(2) / np.sqrt(4 * 0.25 + 1))
    assert expected_rate(clusters, 2.0) == pytest.approx(told, rel=1e-9)


def test_all_of_two_affinities_are_negative_as_often_as_the_product_of_their_tails():
    clusters = GaussianClusters(num_clusters=2, dim=8, contrast=2.0, separation=2.0)
    assert expected_negative(clusters) == pytest.approx(norm.cdf(-2 * np.sqrt(2)) / 2, rel=1e-9)


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
        assert point.wrong["plain"] > 500 and point.left == 0
        assert min(point.repeated_wrong, point.repeated_right) > 0.998
        assert abs(point.wrong["adaptive"] - point.wrong["plain"]) <= 0.001 * FEW


def test_without_contrast_the_true_scale_is_one_and_all_rules_are_the_linear_one(points):
    plain = points[0]
    assert plain.wrong["told"] == plain.wrong["bayes"] == plain.wrong["plain"]
    assert plain.bayes_as_plain and not any(point.bayes_as_plain for point in points[1:])
    assert torch.equal(
        population_scale(torch.full((4, 16), 0.3).double()), torch.ones(4, 16).double()
    )


def test_own_metrics_mend_the_choices_that_the_adaptive_rule_repeats(points):
    for point in points[1:]:
        assert point.wrong["own_metric"] < 0.5 * point.wrong["adaptive"]
        assert point.wrong["bayes"] <= point.wrong["own_metric"] + 0.002 * FEW


def test_told_the_answer_the_rule_beats_the_best_rule_of_the_token_alone(points):
    assert points[1].contrast == 2 and points[1].wrong["told"] < 0.2 * points[1].wrong["bayes"]


def test_equal_seeds_give_equal_sweeps_and_others_other_counts(points):
    assert points == confirmation_sweep(0, FEW)
    assert points[2].wrong != confirmation_sweep(1, FEW)[2].wrong


def test_the_row_is_confirmed_and_holds_every_figure():
    row = check_confirmation(0, FEW)
    assert row.confirmed and row.holds_as_printed is None
    assert row.verdict.startswith("proved") and "only" not in row.verdict
    rates, index = row.figures["plain_rate"], row.figures["plain_ari"]
    assert index == [adjusted_rand(rate, 4) for rate in rates]
    assert rates[2] == pytest.approx(expected_rate(module.CLUSTERS, 1.0), rel=0.1)


def repeats_nothing(x_TD, embedding_ED, scale_CD, assignment_T):
    return (assignment_T + 1) % len(embedding_ED)


def ignores_the_scale(x_TD, embedding_ED, scale_CD, assignment_T):
    return (x_TD @ embedding_ED.T).argmax(-1)


def stretches_loose_features(x_TD, embedding_ED, scale_CD, assignment_T):
    return adaptive_choice(x_TD, embedding_ED, 1 / scale_CD, assignment_T)


@pytest.mark.parametrize("rule", [repeats_nothing, ignores_the_scale, stretches_loose_features])
def test_a_router_that_does_something_else_is_not_confirmed(rule, monkeypatch):
    monkeypatch.setattr(module, "adaptive_choice", rule)
    row = check_confirmation(0, FEW)
    assert not row.confirmed and row.verdict.startswith("not confirmed")


def test_own_metrics_that_bring_nothing_are_not_confirmed(monkeypatch):
    monkeypatch.setattr(module, "own_metric_choice", lambda x_TD, assignment_T, count: assignment_T)
    assert not check_confirmation(0, FEW).confirmed
