"""X problems, D features. By hand: s = (1, 3), lambda = 1.5 has alpha = 0 and w = (3/4, 1/4)."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from acmoe.lab.theory.weights.optimum import (
    check_kkt,
    clustering_objective,
    hard_dispersions,
    kkt_residual,
    minimise,
)
from acmoe.ops.statistics.optimum import optimal_weights

S = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
STRENGTH = torch.tensor([[1.5]], dtype=torch.float64)


def residual(weights):
    return kkt_residual(S, STRENGTH, torch.tensor([weights], dtype=torch.float64)).item()


def test_the_optimum_by_hand_has_no_residual():
    assert residual([0.75, 0.25]) == pytest.approx(0, abs=1e-15)


def test_the_residual_of_one_weight_off_by_a_percent_is_a_percent():
    # 0.2525 (3 - 1) 2 / 1.5 + 0.2525 / 0.75 - 1 = 0.67333 + 0.33667 - 1 = 0.01
    assert residual([0.75, 0.2525]) == pytest.approx(0.01)


def test_the_other_root_is_stationary_and_sums_to_one_but_is_refused_for_its_sign():
    # alpha = -2.5: w = 0.75 / (1 - 2.5), 0.75 / (3 - 2.5) = (-0.5, 1.5).
    assert residual([-0.5, 1.5]) == pytest.approx(0.5)


@pytest.mark.parametrize("weights", [[float("nan"), 0.5], [0.0, 1.0]])
def test_weights_that_are_no_numbers_or_zero_have_a_huge_finite_residual(weights):
    assert 1 <= residual(weights) <= 1e300


def test_hard_dispersions_hold_ties_zeros_and_constant_rows():
    rows_XD = hard_dispersions(torch.Generator().manual_seed(0))
    assert (rows_XD == 0).all(-1).any()
    assert ((rows_XD == 0).any(-1) & (rows_XD > 0).any(-1)).any()
    assert ((rows_XD == rows_XD[:, :1]).all(-1) & (rows_XD > 0).all(-1)).any()
    assert any(len(set(row)) == 3 for row in rows_XD.tolist())


def test_the_criterion_on_two_tokens_is_the_one_worked_out_by_hand():
    # Pairs over N^2 = 4: feature means 2 * 2 / 4 = 1 and 2 * 6 / 4 = 3.
    x_TD = torch.tensor([[0.0, 0.0], [2.0, 6.0]], dtype=torch.float64)
    uniform_D = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert clustering_objective(x_TD, 5.0, uniform_D).item() == pytest.approx(2.0)
    # KL(u || w) = (ln(1 / 1.5) + ln(1 / 0.5)) / 2 = ln(4/3) / 2
    skew_D = torch.tensor([0.75, 0.25], dtype=torch.float64)
    expected = 0.75 + 0.75 + 5 * np.log(4 / 3) / 2
    assert clustering_objective(x_TD, 5.0, skew_D).item() == pytest.approx(expected)


def test_the_optimiser_finds_the_optimum_by_hand():
    x_TD = torch.tensor([[0.0, 0.0], [2.0, 6.0]], dtype=torch.float64)
    found_D = minimise(lambda w_D: clustering_objective(x_TD, 1.5, w_D), 2)
    torch.testing.assert_close(found_D, torch.tensor([0.75, 0.25]).double(), atol=1e-7, rtol=0)


@pytest.mark.parametrize("strength", [0.05, 1.0, 30.0])
def test_scipy_finds_no_better_weights_than_the_library(strength):
    s_D = np.array([0.2, 0.9, 1.0, 1.0, 4.0])

    def objective(w_D):
        return s_D @ w_D - strength / 5 * np.log(5 * w_D).sum()

    found = minimize(
        objective,
        np.full(5, 0.2),
        method="SLSQP",
        bounds=[(1e-9, 1)] * 5,
        constraints={"type": "eq", "fun": lambda w_D: w_D.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    ours_D = optimal_weights(torch.tensor(s_D)[None], strength)[0].numpy()
    assert objective(ours_D) <= found.fun + 1e-9
    np.testing.assert_allclose(ours_D, found.x, atol=2e-4)


def test_the_library_passes_and_its_residual_is_rounding():
    row = check_kkt(0)
    assert (
        row.confirmed
        and row.holds_as_printed is True
        and row.verdict == "holds"
        and row.basis == "proof"
    )
    assert row.figures["max_residual"] < 1e-13
