"""Theorem 1: w_q = (lambda/d) / (s_q + alpha) at the one root where all weights are positive.

C clusters, D features.
"""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acmoe.ops.statistics import optimum
from acmoe.ops.statistics.optimum import optimal_weights
from cases import root_weights
from slow_cases import mostly_slow

# Zeros, ties and anything between a millionth and a million.
dispersions = st.lists(
    st.sampled_from([0.0, 1.0, 1.0, 3.0]) | st.floats(1e-6, 1e6), min_size=1, max_size=12
)
strengths = st.floats(-6.0, 6.0).map(lambda exponent: 10.0**exponent)


def row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def objective(w: Tensor, s: Tensor, strength: float) -> Tensor:
    """sum_q w_q s_q + lambda * KL(uniform || w), up to a constant."""
    return (w * s).sum(-1) - strength * w.log().mean(-1)


@given(s=dispersions, strength=strengths)
def test_weights_satisfy_the_conditions_of_the_optimum(s: list[float], strength: float) -> None:
    s_CD = row(s)
    w_CD = optimal_weights(s_CD, strength)
    assert (w_CD > 0).all()
    assert w_CD.sum().item() == pytest.approx(1, abs=1e-14)
    # Stationarity: lambda / (d w_q) - s_q = alpha for every q. The difference cancels where s
    # exceeds alpha, so it is compared at the size of s.
    alpha = strength / (len(s) * w_CD) - s_CD
    assert (alpha - alpha[..., :1]).abs().max() <= 1e-12 * (s_CD.max() + strength)
    # The largest root: above every pole.
    assert (s_CD + alpha > 0).all()


@given(s=dispersions, strength=strengths)
def test_a_bracketed_root_gives_the_same_weights(s: list[float], strength: float) -> None:
    found = optimal_weights(row(s), strength)
    torch.testing.assert_close(found, row(root_weights(s, strength)), rtol=1e-11, atol=0.0)


@given(s=dispersions, strength=strengths, seed=st.integers(0, 99))
def test_no_nearby_weights_do_better(s: list[float], strength: float, seed: int) -> None:
    s_CD = row(s)
    best = optimal_weights(s_CD, strength)
    noise = torch.randn(20, len(s), generator=torch.Generator().manual_seed(seed)).double()
    others = best * torch.exp(0.3 * noise)
    others = others / others.sum(-1, keepdim=True)
    least = objective(best, s_CD, strength)
    slack = 1e-12 * (least.abs() + s_CD.max() + strength)
    assert (objective(others, s_CD, strength) >= least - slack).all()


def test_two_features_by_hand() -> None:
    # s = (0, 1), lambda = 1: 1/a + 1/(1 + a) = 2, so 2a^2 - 1 = 0, alpha = 1/sqrt(2);
    # w = (1/2)/alpha = 1/sqrt(2) and (1/2)/(1 + 1/sqrt(2)) = 1 - 1/sqrt(2).
    found = optimal_weights(row([0.0, 1.0]), 1.0)
    torch.testing.assert_close(found, row([math.sqrt(0.5), 1 - math.sqrt(0.5)]))


@given(s=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
def test_the_harmonic_mean_as_strength_gives_reciprocal_dispersions(s: list[float]) -> None:
    s_CD = row(s)
    harmonic = 1 / (1 / s_CD).mean().item()
    reciprocal = (1 / s_CD) / (1 / s_CD).sum()
    torch.testing.assert_close(optimal_weights(s_CD, harmonic), reciprocal, rtol=1e-12, atol=0.0)


@given(s=dispersions)
def test_an_infinite_strength_is_the_plain_router(s: list[float]) -> None:
    # w_q - 1/d is of the order (mean(s) - s_q) / (d lambda).
    found = optimal_weights(row(s), 1e9 * (max(s) + 1))
    torch.testing.assert_close(found, torch.full_like(found, 1 / len(s)), rtol=2e-9, atol=0.0)


@given(s=dispersions, strength=strengths)
def test_weights_fall_with_dispersion_and_level_with_strength(
    s: list[float], strength: float
) -> None:
    s_CD = row(sorted(s))
    weak, strong = optimal_weights(s_CD, strength), optimal_weights(s_CD, 2 * strength)
    assert (weak.diff() <= 1e-15).all()
    assert weak.amax() >= strong.amax() - 1e-15
    assert weak.amin() <= strong.amin() + 1e-15


@pytest.mark.parametrize("strength", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dim", [1, 2, 3, 4096])
def test_equal_dispersions_give_equal_weights(strength: float, dim: int) -> None:
    for value in (0.0, 1e-30, 1.0, 1e30):
        found = optimal_weights(torch.full((2, dim), value), strength)
        torch.testing.assert_close(found, torch.full((2, dim), 1 / dim), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("strength", [1e-6, 1e-3, 1.0, 1e3])
def test_one_zero_among_4096_dispersions(strength: float) -> None:
    s = [0.0] + [1.0] * 4095
    found = optimal_weights(row(s), strength)
    torch.testing.assert_close(found, row(root_weights(s, strength)), rtol=1e-11, atol=0.0)
    assert found.sum().item() == pytest.approx(1, abs=1e-13)


def crowded(ratio: float, base: float, levels: int) -> np.ndarray:
    """ratio^k dispersions of size base^k, and one of 0: the more the larger, hard for Newton."""
    sizes = [np.full(round(ratio**k), base**k) for k in range(levels)]
    return np.concatenate([np.zeros(1), *sizes])


@pytest.mark.parametrize(
    ("ratio", "base", "levels"),
    [
        *(pytest.param(4, base, 8, marks=pytest.mark.slow) for base in (2, 1.5, 1.2)),
        pytest.param(2, 1.2, 14, marks=pytest.mark.slow),
        pytest.param(99, 32, 3, marks=pytest.mark.slow),
        *[(64, 16, 3), (16, 1000, 4)],
    ],
)
def test_newton_has_converged_on_the_hardest_spectra(
    ratio: float, base: float, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = torch.from_numpy(crowded(ratio, base, levels))
    strength_C1 = torch.logspace(-6, 6, 73, dtype=torch.float64)[:, None]
    s_CD = s.expand(73, -1)
    found = optimal_weights(s_CD, strength_C1)
    for at in range(0, 73, 12):
        expected = row(root_weights(s.tolist(), strength_C1[at].item()))
        torch.testing.assert_close(found[at : at + 1], expected, rtol=1e-11, atol=0.0)
    # Half the steps already give the same: the number has room for spectra not thought of.
    monkeypatch.setattr(optimum, "_STEPS", optimum._STEPS // 2)
    torch.testing.assert_close(optimal_weights(s_CD, strength_C1), found, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("strength", [5e-324, 1e-300, 1.0, 1e300, 1.7e308])
@pytest.mark.parametrize("s", [[0.0, 5e-324], [0.0, 1.7e308], [1.0, 1.0], [1e-300, 1e300]])
def test_the_ends_of_float64_still_sum_to_one(s: list[float], strength: float) -> None:
    w_CD = optimal_weights(row(s), strength)
    assert (w_CD > 0).all()
    assert w_CD.sum().item() == pytest.approx(1)


@mostly_slow("shape", [(), (1,), (1, 1), (3, 1)], keep=(3,))
def test_gradcheck_in_dispersion_and_strength(
    shape: tuple[int, ...], generator: torch.Generator
) -> None:
    s_CD = torch.rand(3, 4, dtype=torch.float64, generator=generator)
    s_CD[0, 1] = s_CD[0, 2]  # a tie
    s_CD[1] += 5
    strength = 0.2 + torch.rand(shape, dtype=torch.float64, generator=generator)
    inputs = (s_CD.requires_grad_(), strength.requires_grad_())
    assert torch.autograd.gradcheck(optimal_weights, inputs)
    assert torch.autograd.gradgradcheck(optimal_weights, inputs)


def test_the_gradient_at_a_dispersion_of_zero_is_one_sided_and_finite() -> None:
    # By hand at s = (0, 1), lambda = 1, d = 2: with w from above, dw_0/ds_0 of
    # -(d/lambda) w_0^2 (1 - w_0^2 / (w_0^2 + w_1^2)).
    w0, w1 = math.sqrt(0.5), 1 - math.sqrt(0.5)
    s_CD = row([0.0, 1.0]).requires_grad_()
    optimal_weights(s_CD, 1.0)[0, 0].backward()
    slope = 2 * w0**2 * w1**2 / (w0**2 + w1**2)
    torch.testing.assert_close(s_CD.grad, row([-slope, slope]))


def test_any_leading_dimensions_and_one_strength_a_row(generator: torch.Generator) -> None:
    s = torch.rand(2, 3, 5, dtype=torch.float64, generator=generator)
    strength = 0.1 + torch.rand(2, 3, 1, dtype=torch.float64, generator=generator)
    found = optimal_weights(s, strength)
    for b, c in np.ndindex(2, 3):
        alone = optimal_weights(s[b, c], strength[b, c].item())
        torch.testing.assert_close(found[b, c], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_solved_in_float64(dtype: torch.dtype, generator: torch.Generator) -> None:
    s_CD = torch.rand(3, 8, generator=generator).to(dtype)
    found = optimal_weights(s_CD, 0.3)
    assert found.dtype == dtype
    assert torch.equal(found, optimal_weights(s_CD.double(), 0.3).to(dtype))


# The compiler itself makes an instance of a torch.autograd.Function while it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_compiler_sees_one_graph(generator: torch.Generator) -> None:
    solve = functools.partial(optimal_weights, strength=0.3)
    s_CD = torch.rand(3, 8, generator=generator)
    compiled = torch.compile(solve, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(s_CD), solve(s_CD))
