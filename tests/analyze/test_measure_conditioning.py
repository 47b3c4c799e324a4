"""Condition numbers of second moments, by hand."""

import pytest
import torch

from acmoe.analyze.measure.conditioning import condition_number


def test_axes_of_lengths_one_and_three_have_condition_nine() -> None:
    # E[x x^T] = diag(1, 9) / 2.
    found = condition_number(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    assert found.number == pytest.approx(9)
    assert found.rank == 2


def test_a_rotation_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    turn_DD = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    expected = condition_number(x_ND).number
    assert condition_number(x_ND @ turn_DD).number == pytest.approx(expected)


def test_the_moment_is_not_centred() -> None:
    # Tokens (1, 2) and (-1, 2): second moment diag(1, 4); centred it would be diag(1, 0).
    assert condition_number(torch.tensor([[1.0, 2.0], [-1.0, 2.0]])).number == pytest.approx(4)


def test_a_direction_that_only_rounding_fills_is_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(500, 6, generator=generator)
    x_ND -= x_ND.mean(1, keepdim=True)  # as LayerNorm does
    found = condition_number(x_ND)
    assert found.rank == 5
    assert found.number < 3  # about (1 + sqrt(5 / 500))^2 / (1 - sqrt(5 / 500))^2 = 1.5


def test_nothing_but_zeros_has_no_rank() -> None:
    assert condition_number(torch.zeros(3, 2)) == (1.0, 0)
