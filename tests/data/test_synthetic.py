"""T tokens, D features, C clusters."""

import math

import pytest
import torch

from acmoe.data.synthetic import GaussianClusters
from acmoe.errors import UserError


def test_means_and_deviations_of_a_small_mixture_are_those_worked_out_by_hand():
    clusters = GaussianClusters(
        num_clusters=2, dim=5, tight_features=2, contrast=4, separation=2, noise=0.75
    )
    # Each mean has norm 2 / sqrt(2), spread over two features: 2 / sqrt(4) = 1 on each.
    assert clusters.means.tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0]]
    assert clusters.clean_stds.tolist() == [[0.25, 0.25, 1, 1, 1], [1, 1, 0.25, 0.25, 1]]
    # sqrt(1 + 0.5625) = 1.25 where loose, sqrt(0.0625 + 0.5625) = sqrt(0.625) where tight.
    assert clusters.stds[0, 2].item() == pytest.approx(1.25)
    assert clusters.stds[0, 0].item() == pytest.approx(math.sqrt(0.625))


def test_every_two_means_are_the_separation_apart():
    means_CD = GaussianClusters(num_clusters=5, dim=21, tight_features=4, separation=3.5).means
    distance_CC = torch.cdist(means_CD, means_CD)
    apart = ~torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(distance_CC[apart], torch.full((20,), 3.5, dtype=torch.float64))


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_sample_moments_match_the_closed_form(noise):
    clusters = GaussianClusters(
        num_clusters=3, dim=8, tight_features=2, contrast=5, separation=4, noise=noise
    )
    generator = torch.Generator().manual_seed(0)
    x_TD, cluster_T = clusters.sample(60_000, generator, dtype=torch.float64)
    assert (cluster_T.bincount() / 60_000 - 1 / 3).abs().max() < 0.01  # 5 standard errors
    for c in range(3):
        own_TD = x_TD[cluster_T == c]
        standard_error_D = clusters.stds[c] / math.sqrt(len(own_TD))
        assert ((own_TD.mean(0) - clusters.means[c]).abs() < 5 * standard_error_D).all()
        # The relative standard error of a deviation is 1 / sqrt(2 n).
        torch.testing.assert_close(own_TD.std(0), clusters.stds[c], rtol=5 / 200, atol=0)
        correlation_DD = torch.corrcoef(own_TD.T) - torch.eye(8, dtype=torch.float64)
        assert correlation_DD.abs().max() < 5 / math.sqrt(len(own_TD))


def test_equal_generators_draw_equal_tokens_and_the_dtype_is_the_one_asked_for():
    clusters = GaussianClusters()
    first, second = (clusters.sample(50, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert first[0].dtype == torch.float32 and first[0].shape == (50, 16)
    assert clusters.sample(0, torch.Generator())[0].shape == (0, 16)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_clusters": 0}, "num_clusters=0"),
        ({"tight_features": 0}, "tight_features=0"),
        ({"num_clusters": 5, "tight_features": 4, "dim": 19}, "dim of at least 20"),
        ({"contrast": 0.5}, "contrast=0.5"),
        ({"separation": -1.0}, "separation=-1.0"),
        ({"noise": float("nan")}, "noise=nan"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_with_its_value(wrong, named):
    with pytest.raises(UserError, match=named):
        GaussianClusters(**wrong)


def test_a_negative_number_of_tokens_is_refused():
    with pytest.raises(UserError, match="num_tokens=-1"):
        GaussianClusters().sample(-1, torch.Generator())
