import math

import pytest
import torch

from acmoe.lab.theory import convergence as module
from acmoe.lab.theory.convergence import (
    EXPERTS,
    centred_tokens,
    check_rotated,
    hand_counterexample,
    separated_tokens,
)


def test_unit_variances_raise_the_condition_number_of_the_hand_example():
    plain, adaptive = hand_counterexample()
    assert plain == pytest.approx(10)
    # Sigma = [[2, -2, -2], [-2, 5, 4], [-2, 4, 5]] has the correlations -2/sqrt(10), -2/sqrt(10)
    # and 4/5. (0, 1, -1) has the eigenvalue 1 - 0.8 = 0.2; on (1, 0, 0) and (0, 1, 1)/sqrt(2) they
    # make [[1, -2/sqrt(5)], [-2/sqrt(5), 1.8]]: trace 2.8, determinant 1, largest 1.4 + sqrt(0.96).
    assert adaptive == pytest.approx((1.4 + math.sqrt(0.96)) / 0.2)


@pytest.mark.parametrize("rotated", [False, True])
def test_centred_tokens_have_no_mean_in_any_cluster(rotated):
    generator = torch.Generator().manual_seed(0)
    x_XTD, cluster_XT, embeddings_XED = centred_tokens(generator, rotated=rotated, draws=3)
    for c in range(EXPERTS):
        assert x_XTD[:, cluster_XT[0] == c].mean(1).abs().max() < 1e-12
    assert embeddings_XED.shape == (3, EXPERTS, x_XTD.shape[-1])


def test_only_rotated_tokens_have_correlated_features():
    largest = {}
    for rotated in (False, True):
        x_XTD = centred_tokens(torch.Generator().manual_seed(0), rotated=rotated, draws=1)[0]
        off_diagonal = torch.corrcoef(x_XTD[0].T) - torch.eye(x_XTD.shape[-1]).double()
        largest[rotated] = off_diagonal.abs().max().item()
    assert largest[False] < 0.15 < 0.5 < largest[True]


def test_separated_tokens_are_centred_as_a_whole_and_apart_by_cluster():
    x_XTD, cluster_XT, _ = separated_tokens(torch.Generator().manual_seed(0), draws=2)
    assert x_XTD.mean(1).abs().max() < 1e-12
    means_CD = torch.stack([x_XTD[0][cluster_XT[0] == c].mean(0) for c in range(EXPERTS)])
    assert torch.pdist(means_CD).min() > 1.7  # 2 but for the sampling


def test_a_counterexample_that_fails_to_be_one_is_not_confirmed(monkeypatch):
    monkeypatch.setattr(module, "hand_counterexample", lambda: (10.0, 10.0))
    row = check_rotated(0)
    assert not row.confirmed and row.verdict.startswith("not confirmed")
