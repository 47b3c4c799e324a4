"""Tightness and separation of clusters, by hand."""

import math

import pytest
import torch

from acmoe.analyze.measure import separation
from acmoe.analyze.measure.separation import measure_separation, silhouette, within_share

# Two clusters of two on a line: 0 and 1, 10 and 11.
LINE = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
LABEL = torch.tensor([0, 0, 1, 1])


def test_within_share_of_two_pairs_by_hand() -> None:
    # Inside: 4 * 0.5^2 = 1. About the mean 5.5: 2 * (5.5^2 + 4.5^2) = 101.
    assert within_share(LINE, LABEL) == pytest.approx(1 / 101)


def test_clusters_of_equal_means_are_all_within() -> None:
    x_ND = torch.tensor([[0.0], [2.0], [1.0], [1.0]])
    assert within_share(x_ND, LABEL) == 1


def test_clusters_of_equal_tokens_have_nothing_within() -> None:
    x_ND = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    assert within_share(x_ND, LABEL) == 0


def test_equal_tokens_are_not_separated() -> None:
    assert within_share(torch.ones(4, 2), LABEL) == 1


def test_silhouette_of_two_pairs_by_hand() -> None:
    # Outer tokens: own distance 1, to the other pair 10.5 on average: 1 - 1 / 10.5. Inner: 9.5.
    expected = 1 - (1 / 10.5 + 1 / 9.5) / 2
    assert silhouette(LINE, LABEL) == pytest.approx(expected)


def test_tokens_alone_in_their_cluster_and_without_one_take_no_part() -> None:
    x_ND = torch.cat([LINE, torch.tensor([[500.0], [-900.0]])])
    label_N = torch.tensor([0, 0, 1, 1, 2, -1])
    assert measure_separation(x_ND, label_N) == measure_separation(LINE, LABEL)


def test_one_cluster_has_no_separation() -> None:
    found = measure_separation(LINE, torch.zeros(4).long())
    assert (found.within_share, found.silhouette) == (None, None)


def test_many_tokens_are_sampled_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separation, "SILHOUETTE_TOKENS", 40)
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(400, 3, generator=generator)
    label_N = torch.arange(400) % 2
    x_ND[label_N == 1] += 8
    first, again = (silhouette(x_ND, label_N, seed=3) for _ in range(2))
    other = silhouette(x_ND, label_N, seed=4)
    assert first == again
    assert first != other
    # Clusters 8 sqrt(3) = 13.9 apart, tokens of one 2.3 apart on average: near 1 - 2.3 / 13.9.
    assert first == pytest.approx(1 - 2.3 / (8 * math.sqrt(3)), abs=0.05)
