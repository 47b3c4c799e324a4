"""T tokens, D features, E experts, C clusters."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from acmoe.lab.theory.conditioning.convergence import (
    axis_tokens,
    check_constant_gate,
    check_separated,
    check_varying_gate,
    rotated_example,
    separated_clusters,
    varying_gate,
)
from acmoe.lab.theory.conditioning.draws import (
    EXPERTS,
    centred_tokens,
)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_axis_tokens_have_the_means_covariances_and_mean_absolute_deviations_asked_for():
    mean_CD, std_CD = tensor([1.0, 2.0], [0.0, -1.0]), tensor([0.5, 3.0], [1.0, 1.0])
    x_TD, cluster_T = axis_tokens(mean_CD, std_CD)
    for c in range(2):
        own_TD = x_TD[cluster_T == c]
        torch.testing.assert_close(own_TD.mean(0), mean_CD[c])
        torch.testing.assert_close(torch.cov(own_TD.T, correction=0), torch.diag(std_CD[c] ** 2))
        mad_D = (own_TD - mean_CD[c]).abs().mean(0)
        torch.testing.assert_close(mad_D, std_CD[c] / math.sqrt(2))


def test_a_constant_gate_is_conditioned_as_proved():
    row = check_constant_gate(0, draws=3)
    assert row.confirmed and row.basis == "proof" and row.holds_as_printed is None
    assert row.figures["largest_condition"] > 10


@pytest.mark.parametrize(("scale", "printed"), [((1.0, 1.0), 3.12), ((2 / 3, 4 / 3), 6.32)])
def test_a_gate_that_decides_is_conditioned_as_scipy_integrates(scale, printed):
    first, second = 2 * scale[0], scale[1]

    def moment(power):
        def integrand(z):
            gate = 1 / (1 + np.exp(-3 * first * z))
            return gate * (1 - gate) * z**power * np.exp(-z * z / 2)

        return quad(integrand, -12, 12, points=[0], limit=200)[0]

    ratio = first**2 * moment(2) / (second**2 * moment(0))
    wanted = max(ratio, 1 / ratio)
    assert wanted == pytest.approx(printed, abs=0.005)
    assert varying_gate(tensor(*scale)) == pytest.approx(wanted, rel=1e-7)


def test_the_example_of_the_varying_gate_contradicts_the_proposition():
    row = check_varying_gate(0)
    assert row.confirmed and row.holds_as_printed is False


def test_unit_variances_raise_the_condition_number_of_the_rotated_example():
    plain, adaptive = rotated_example()
    assert plain == pytest.approx(10)
    # Sigma = [[2, -2, -2], [-2, 5, 4], [-2, 4, 5]] has the correlations -2/sqrt(10), -2/sqrt(10)
    # and 4/5. (0, 1, -1) has the eigenvalue 1 - 0.8 = 0.2; on (1, 0, 0) and (0, 1, 1)/sqrt(2) they
    # make [[1, -2/sqrt(5)], [-2/sqrt(5), 1.8]]: trace 2.8, determinant 1, largest 1.4 + sqrt(0.96).
    assert adaptive == pytest.approx((1.4 + math.sqrt(0.96)) / 0.2)


def test_separated_clusters_are_worse_alone_and_better_with_common_loose_features():
    row = check_separated(0)
    assert row.confirmed and row.holds_as_printed is False
    # Alone: the second moment has (1/16 + 3)/4 on its diagonal, and the largest variance of the
    # centred means, 4 / 8, beside it: (0.765625 + 0.5) / 0.765625.
    assert row.figures["plain"] == pytest.approx(1.265625 / 0.765625)
    # 25 of the common features over 0.765625.
    assert row.figures["plain_with_common_features"] == pytest.approx(25 / 0.765625)
    mean_CD, std_CD = separated_clusters(5.0)
    assert mean_CD.mean(0).abs().max() < 1e-12 and std_CD[:, -2:].eq(5).all()


@pytest.mark.parametrize("rotated", [False, True])
def test_centred_tokens_have_no_mean_in_any_cluster(rotated):
    generator = torch.Generator().manual_seed(0)
    x_XTD, cluster_XT, embeddings_XED = centred_tokens(
        generator, width=1.0, rotated=rotated, draws=3
    )
    for c in range(EXPERTS):
        assert x_XTD[:, cluster_XT[0] == c].mean(1).abs().max() < 1e-12
    assert embeddings_XED.shape == (3, EXPERTS, x_XTD.shape[-1])


def test_only_rotated_tokens_have_correlated_features():
    largest = {}
    for rotated in (False, True):
        generator = torch.Generator().manual_seed(0)
        x_XTD = centred_tokens(generator, width=1.0, rotated=rotated, draws=1)[0]
        off_diagonal = torch.corrcoef(x_XTD[0].T) - torch.eye(x_XTD.shape[-1]).double()
        largest[rotated] = off_diagonal.abs().max().item()
    assert largest[False] < 0.15 < 0.5 < largest[True]
