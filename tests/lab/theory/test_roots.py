import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.lab.theory.weights.roots import (
    check_distinct_roots,
    check_tied_roots,
    phi,
    real_roots,
    spectral_roots,
)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("find", [real_roots, spectral_roots])
def test_two_dispersions_have_the_roots_of_their_quadratic(find):
    # 1/(1 + a) + 1/(3 + a) = 4/3  <=>  4 a^2 + 10 a = 0
    torch.testing.assert_close(find(tensor(1.0, 3.0), 1.5), tensor(-2.5, 0.0))


@pytest.mark.parametrize("find", [real_roots, spectral_roots])
def test_two_equal_dispersions_have_one_root(find):
    # 2/(1 + a) = 2  <=>  a = 0
    torch.testing.assert_close(find(tensor(1.0, 1.0), 1.0), tensor(0.0), atol=1e-12, rtol=0)


def test_phi_at_a_pole_offset_equals_phi_at_the_point():
    s_D, pole = tensor(1.0, 2.0, 4.0), tensor(-2.0)
    offset = tensor(0.25)
    # alpha = -1.75: 1/(-0.75) + 1/0.25 + 1/2.25 - 3/3 = -4/3 + 4 + 4/9 - 1 = 19/9
    assert phi(offset, s_D, 3.0, pole=pole).item() == pytest.approx(19 / 9)
    assert phi(pole + offset, s_D, 3.0).item() == pytest.approx(19 / 9)


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=5),
    st.sampled_from([0.3, 2.0, 25.0]),
)
def test_roots_are_those_of_the_polynomial_once_tied_factors_are_divided_out(values, strength):
    # n_j copies of v_j: sum_j n_j prod_{i != j} (v_i + a) = (d / lambda) prod_i (v_i + a)
    distinct = sorted(set(values))
    polynomial = -len(values) / strength * np.poly1d([-v for v in distinct], r=True)
    for v in distinct:
        others = np.poly1d([-u for u in distinct if u != v], r=True)
        polynomial = polynomial + values.count(v) * others
    expected = np.sort(polynomial.roots.real)
    found = real_roots(tensor(*map(float, values)), strength).numpy()
    assert len(found) == len(distinct)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_distinct_dispersions_have_d_roots_and_the_largest_alone_gives_weights():
    row = check_distinct_roots(0, draws=3)
    assert row.confirmed and row.holds_as_printed is True
    assert row.figures["fewest_roots"] == row.figures["most_roots"] == 6
    assert row.figures["equations_where_only_the_largest_is_positive"] == 15


def test_tied_dispersions_contradict_the_lemma():
    row = check_tied_roots(0, draws=3)
    assert row.confirmed and row.holds_as_printed is False
    assert row.figures["roots_of_two_equal_dispersions"] == 1
    assert row.verdict.startswith("fails as printed")
