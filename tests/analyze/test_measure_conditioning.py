"""Condition numbers of covariances whose eigenvalues are known."""

import pytest
import torch
from torch import Tensor

from acmoe.analyze.measure.conditioning import TOLERANCE, condition_number


def tokens_with(variances: list[float]) -> Tensor:
    """Tokens whose covariance has exactly these eigenvalues, in directions of no axis.

    Columns of a Hadamard matrix but the first are orthogonal and sum to zero.
    """
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) <= len(variances):
        hadamard = torch.cat(
            [torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]
        )
    x_ND = hadamard[:, 1 : len(variances) + 1] * torch.tensor(variances, dtype=torch.float64).sqrt()
    torch.manual_seed(0)
    turn_DD = torch.linalg.qr(torch.randn(len(variances), len(variances), dtype=torch.float64)).Q
    return x_ND @ turn_DD


def test_axes_of_variance_one_and_nine_have_condition_nine() -> None:
    found = condition_number(torch.tensor([[1.0, 3.0], [-1.0, 3.0], [1.0, -3.0], [-1.0, -3.0]]))
    assert found.number == pytest.approx(9)
    assert found.rank == 2


@pytest.mark.parametrize("nulls", [0, 1, 3])
def test_eigenvalues_one_to_seven_and_directions_without_variance(nulls: int) -> None:
    x_ND = tokens_with([*range(1, 8), *[0.0] * nulls])
    found = condition_number(x_ND)
    assert found.number == pytest.approx(7)
    assert found.rank == 7
    # A shift of all tokens changes nothing, though it points along a direction without variance.
    shift_D = torch.linalg.eigh(x_ND.T @ x_ND).eigenvectors[:, 0]
    for size in (1e-3, 1.0, 1e3):
        shifted = condition_number(x_ND + size * shift_D)
        assert shifted.number == pytest.approx(7)
        assert shifted.rank == 7


def test_the_tolerance_is_relative_to_the_largest_variance() -> None:
    for unit in (1e-8, 1.0, 1e8):
        kept, dropped = (tokens_with([unit * TOLERANCE * f, unit]) for f in (2.0, 0.5))
        assert condition_number(kept) == (pytest.approx(0.5 / TOLERANCE), 2)
        assert condition_number(dropped) == (pytest.approx(1.0), 1)


def test_a_layer_norm_with_gain_and_bias_leaves_one_direction_out() -> None:
    # LayerNorm(x) = g * u + b with sum(u) = 0: no variance along 1/g, and a mean of b there.
    torch.manual_seed(0)
    gain_D, bias_D = 0.5 + torch.rand(16), torch.randn(16)
    x_ND = torch.nn.functional.layer_norm(torch.randn(2000, 16), (16,), gain_D, bias_D)
    found, without = condition_number(x_ND), condition_number(x_ND - bias_D)
    assert (found.rank, without.rank) == (15, 15)
    assert found.number == pytest.approx(without.number, rel=1e-5)
    # g^2 lies between 0.25 and 2.25: about 9 and sampling noise.
    assert found.number < 15


def test_equal_tokens_have_no_rank() -> None:
    assert condition_number(torch.zeros(3, 2)) == (1.0, 0)
    assert condition_number(torch.full((3, 2), 5.0)) == (1.0, 0)
