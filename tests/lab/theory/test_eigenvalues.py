import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.lab.theory.conditioning.eigenvalues import (
    bound_ratios,
    check_eigenvalue_lemma,
    check_eigenvalue_order,
    hand_counterexample,
    order_counterexample,
)


def test_a_rotation_by_hand_breaks_the_printed_bound():
    # cos = 0.98, sin^2 = 1 - 0.9604 = 0.0396; Sigma_11 = 2 * 0.9604 + 0.0396 = 1.9604.
    left, printed = hand_counterexample(0.02)
    assert left == pytest.approx(2 - 1.9604)
    assert printed == 0.02 and left > printed


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.floats(1e-4, 0.9))
def test_every_plane_rotation_meets_the_corrected_bound_with_equality(eps):
    left, _ = hand_counterexample(eps)
    assert left == pytest.approx(2 * eps - eps**2, rel=1e-9)
    assert left > eps


def test_ratios_of_a_plane_rotation_are_the_squared_sine():
    cos, sin = math.cos(0.2), math.sin(0.2)
    vectors_DD = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
    ratio, eps = bound_ratios(torch.tensor([5.0, 2.0], dtype=torch.float64), vectors_DD)
    assert ratio.item() == pytest.approx(sin**2)
    assert eps.item() == pytest.approx(1 - cos)


def test_the_lemma_fails_as_printed_and_holds_corrected():
    row = check_eigenvalue_lemma(0)
    assert row.confirmed and row.holds_as_printed is False
    assert row.figures["violations"] > 0 and row.figures["corrected_violations"] == 0
    assert row.figures["worst_ratio_to_eps"] < 2


def test_neighbouring_eigenvalues_exchange_the_order_of_their_variances():
    # 0.998 * 100 + 0.002 * 1, then 1.1, then 0.002 * 100 + 0.998 * 1.
    variance, scale, eps = order_counterexample()
    assert variance == pytest.approx([99.802, 1.1, 1.198])
    assert eps == pytest.approx(1 - math.sqrt(0.998)) and eps < 1.01e-3
    assert scale[1] / scale[2] == pytest.approx(math.sqrt(1.198 / 1.1))
    row = check_eigenvalue_order(0)
    assert row.confirmed and row.holds_as_printed is False
