"""T tokens, D features, C clusters and as many experts, E."""

import numpy as np
import pytest
import torch
from scipy.stats import ncx2, norm

from acmoe.data.synthetic import GaussianClusters
from acmoe.lab.theory.rules import (
    adaptive_choice,
    bayes_choice,
    distance_choice,
    own_metric_choice,
)


def test_choices_are_the_largest_inner_product_and_the_least_distance_written_out():
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    embedding_ED = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    scale_CD = torch.rand(4, 3, generator=generator, dtype=torch.float64) + 0.1
    assignment_T = torch.randint(4, (50,), generator=generator)
    found_T = adaptive_choice(x_TD, embedding_ED, scale_CD, assignment_T)
    near_T = distance_choice(x_TD, embedding_ED, scale_CD, assignment_T)
    for x_D, cluster, found, near in zip(x_TD, assignment_T, found_T, near_T, strict=True):
        m_D = scale_CD[cluster]
        affinity = [sum(x_D[q] * m_D[q] * e_D[q] for q in range(3)) for e_D in embedding_ED]
        assert found == max(range(4), key=lambda k, affinity=affinity: affinity[k])
        far = [sum(m_D[q] * (x_D[q] - e_D[q]) ** 2 for q in range(3)) for e_D in embedding_ED]
        assert near == min(range(4), key=lambda k, far=far: far[k])


def test_own_metrics_prefer_the_wide_cluster_far_out_and_the_tight_one_near_by():
    # One feature, both means 0, variances 1 and 16: densities cross where
    # x^2 (1 - 1/16) = log 16, at |x| = 1.72.
    x_TD = torch.tensor([[-1.0], [1.0], [-4.0], [4.0]], dtype=torch.float64).repeat(5000, 1)
    assignment_T = torch.tensor([0, 0, 1, 1]).repeat(5000)
    assert own_metric_choice(x_TD, assignment_T, 2).tolist() == [0, 0, 1, 1] * 5000
    # The same tokens all assigned to both alike: no expert has a metric of its own.
    mixed_T = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0]).repeat(2500)
    assert len(set(own_metric_choice(x_TD, mixed_T, 2).tolist())) == 1


def test_own_metrics_of_the_true_clusters_choose_nearly_as_bayes():
    clusters = GaussianClusters(contrast=2.0)
    x_TD, cluster_T = clusters.sample(20_000, torch.Generator().manual_seed(0), dtype=torch.float64)
    found_T = own_metric_choice(x_TD, cluster_T, 4)
    assert (found_T == bayes_choice(x_TD, clusters)).double().mean() > 0.99


def bayes_rate(clusters: GaussianClusters) -> float:
    """Log densities differ by -A/2 sum over the own block of (x - b)^2, b = mu / (1 - tight^2).

    That sum is a noncentral chi-square: of x ~ N(0, 1) for another cluster's block, of
    x ~ N(mu, tight^2) for the token's own, which must have the least.
    """
    size, tight = clusters.tight_features, 1 / clusters.contrast
    mean = clusters.means[0, 0].item()
    b = mean / (1 - tight**2)
    y = np.linspace(0, 200 * tight**2 + 400 * tight, 200_001)
    own = ncx2.pdf(y / tight**2, size, size * ((mean - b) / tight) ** 2) / tight**2
    others = ncx2.sf(y, size, size * b**2) ** (clusters.num_clusters - 1)
    return 1 - float(np.trapezoid(own * others, y))


@pytest.mark.parametrize(
    "contrast", [2.0, *(pytest.param(value, marks=pytest.mark.slow) for value in (1.5, 4.0))]
)
def test_the_bayes_rule_errs_as_often_as_noncentral_chi_squares_say(contrast):
    clusters, tokens = GaussianClusters(contrast=contrast), 100_000
    x_TD, cluster_T = clusters.sample(tokens, torch.Generator().manual_seed(1), dtype=torch.float64)
    found = (bayes_choice(x_TD, clusters) != cluster_T).double().mean().item()
    expected = bayes_rate(clusters)
    deviation = (expected * (1 - expected) / tokens) ** 0.5
    assert abs(found - expected) < norm.isf(1e-5) * deviation
