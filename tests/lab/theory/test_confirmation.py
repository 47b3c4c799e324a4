"""T tokens, D features, C clusters and as many experts, E."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from acmoe.data.synthetic import GaussianClusters
from acmoe.lab.theory.repeats import confirmation as module
from acmoe.lab.theory.repeats.blocks import block_rates
from acmoe.lab.theory.repeats.confirmation import (
    CLUSTERS,
    check_confirmation,
    check_confirmation_scope,
    exact,
    tight_on,
)
from acmoe.lab.theory.robustness.misassignment import nearest
from acmoe.lab.theory.rules import adaptive_choice, distance_choice
from acmoe.lab.theory.scale import exact_scale
from slow_cases import mostly_slow

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


def test_a_nearest_mean_is_left_only_by_tokens_nearer_to_the_origin():
    # Squared distances in M_j differ by -2 m_jk (a_k - u^2 / 2): the same rule, less a bias, which
    # is not negative where the token is at least as near to mean j as to 0.
    clusters = GaussianClusters(contrast=2.0, separation=2.0)
    x_TD, _ = clusters.sample(FEW, torch.Generator().manual_seed(0), dtype=torch.float64)
    first_T = nearest(x_TD, clusters.means, torch.ones(16).double())
    scale_CD = exact_scale(clusters.stds)
    leaves_T = distance_choice(x_TD, clusters.means, scale_CD, first_T) != first_T
    away_T = (x_TD - clusters.means[first_T]).norm(dim=-1) > x_TD.norm(dim=-1)
    assert 0 < leaves_T.sum() < away_T.sum()
    assert not (leaves_T & ~away_T).any()


def two_blocks(tight=0.5, length=2**0.5):
    """Two clusters: deviations (tight, 1) and (1, tight) of the blocks."""
    std_CC = torch.tensor([[tight, 1.0], [1.0, tight]], dtype=torch.float64)
    return block_rates(length, std_CC, exact_scale(std_CC))


def test_for_two_clusters_the_plain_error_is_the_tail_of_one_normal():
    # u (u + tight z) against u z': their difference is N(u, tight^2 + 1) in units of u.
    found = two_blocks()
    assert found.plain_wrong == pytest.approx(norm.sf(np.sqrt(2) / np.sqrt(1.25)), rel=1e-9)
    # All affinities are negative as often as the product of their tails.
    assert found.negative == pytest.approx(norm.cdf(-2 * np.sqrt(2)) / 2, rel=1e-9)


def test_for_two_clusters_those_who_leave_are_a_wedge_of_the_negative_quadrant():
    # Affinities a, b of cluster 0, both negative; b < a and 2 a < b leave 0, and the mirror image
    # leaves 1: integrals of the two densities over wedges, here by a sum over a fine grid.
    a = np.linspace(-8, 0, 4001)
    step = a[1] - a[0]
    own = norm.pdf(a, np.sqrt(2), 0.5)
    leaves_first = (own * (norm.cdf(a) - norm.cdf(2 * a))).sum() * step
    leaves_second = (
        norm.pdf(a) * (norm.cdf(a, np.sqrt(2), 0.5) - norm.cdf(2 * a, np.sqrt(2), 0.5))
    ).sum() * step
    assert two_blocks().left == pytest.approx(leaves_first + leaves_second, rel=2e-3)
    assert 0 < two_blocks().left < two_blocks().negative


@mostly_slow("name", ["next block", "own block", "other blocks"])
def test_quadrature_agrees_with_counting(name):
    std_CD = tight_on()[name]
    found = exact(CLUSTERS, std_CD, mended=True)
    generator = torch.Generator().manual_seed(7)
    x_TD, cluster_T = module.sample(CLUSTERS, std_CD, generator, 200_000)
    plain_T = (x_TD @ CLUSTERS.means.T).argmax(-1)
    choice_T = ((x_TD * exact_scale(std_CD)[plain_T]) @ CLUSTERS.means.T).argmax(-1)
    wrong_T, again_T = plain_T != cluster_T, choice_T == plain_T
    for value, counted_T in (
        (found.plain_wrong, wrong_T),
        (found.adaptive_wrong, choice_T != cluster_T),
        (found.repeated_wrong, again_T[wrong_T]),
        (found.repeated_right, again_T[~wrong_T]),
        (found.left, ~again_T),
    ):
        deviation = (max(value * (1 - value), 1e-12) / len(counted_T)) ** 0.5
        assert abs(counted_T.double().mean().item() - value) < 4.5 * deviation + 1e-6


def test_without_contrast_nobody_leaves():
    plain = replace(CLUSTERS, contrast=1.0)
    found = exact(plain, plain.stds, mended=True)
    assert found.left == pytest.approx(0, abs=1e-12)
    assert found.adaptive_wrong == pytest.approx(found.plain_wrong, abs=1e-12)


def test_the_row_exercises_the_hypothesis_that_affinities_are_not_negative():
    row = check_confirmation(0, FEW)
    assert row.confirmed and row.holds_as_printed is None and row.basis == "proof"
    assert min(row.figures["left"]) > 1e-3
    assert all(a < b for a, b in zip(row.figures["left"], row.figures["negative"], strict=True))


def test_the_scope_row_says_where_choices_end_to_be_repeated():
    row = check_confirmation_scope(0, FEW)
    assert row.confirmed and row.holds_as_printed is None
    assert row.figures["own_block_repeated_wrong"] > 0.999
    assert row.figures["next_block_repeated_wrong"] < 0.5
    assert row.figures["other_blocks_adaptive_wrong"] > 0.14


def repeats_nothing(x_TD, embedding_ED, scale_CD, assignment_T):
    return (assignment_T + 1) % len(embedding_ED)


def ignores_the_scale(x_TD, embedding_ED, scale_CD, assignment_T):
    return (x_TD @ embedding_ED.T).argmax(-1)


@pytest.mark.parametrize("rule", [repeats_nothing, ignores_the_scale])
def test_a_router_that_does_something_else_is_not_confirmed(rule, monkeypatch):
    monkeypatch.setattr(module, "adaptive_choice", rule)
    row = check_confirmation(0, FEW)
    assert not row.confirmed and row.verdict.startswith("not confirmed")
