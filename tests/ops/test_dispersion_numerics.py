"""Dispersion in floating point: low precision, offsets, exact zeros, outliers, broken tokens.

B sequences of L tokens (or T tokens), D features, C clusters.
"""

import math

import numpy as np
import pytest
import torch
from dispersion_cases import measures, of_tokens
from hypothesis import given
from hypothesis import strategies as st

from acmoe.ops.statistics.dispersion import dispersion, dispersion_and_count
from cases import TokenSet


@measures
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_tokens_are_summed_in_float32(
    measure: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x_TD = (100 + torch.randn(300, 4, generator=generator)).to(dtype)
    assignment_T = torch.arange(300) % 3
    found = dispersion(x_TD, assignment_T, 3, measure=measure)
    assert found.dtype == torch.float32
    assert torch.equal(found, dispersion(x_TD.float(), assignment_T, 3, measure=measure))


@measures
def test_a_large_common_offset_costs_no_precision(measure: str, generator: torch.Generator) -> None:
    x_TD = 1000 + torch.randn(2000, 2, generator=generator)
    tokens = TokenSet(x_TD, torch.arange(2000) % 2, 2, None)
    # The same float32 numbers in float64; Theorem 1's double loop would take minutes.
    exact = of_tokens(tokens._replace(x=x_TD.double()), measure)
    found = of_tokens(tokens, measure).double()
    torch.testing.assert_close(found, exact, rtol=3e-6, atol=0.0)


def test_the_interquartile_range_of_two_near_tokens_is_half_their_distance() -> None:
    # They are two units in the last place apart, 2^-14 each. The quartiles, 1000 + 2^-15 and
    # 1000 + 3 * 2^-15, lie between float32 numbers.
    x_TD = torch.tensor([[1000.0], [1000.0 + 2**-13]])
    assert dispersion(x_TD, torch.tensor([0, 0]), 1, measure="iqr").item() == 2**-14


@measures
@given(
    value=st.floats(-1e6, 1e6, width=32),
    other=st.floats(-1e6, 1e6, width=32),
    n=st.integers(1, 200),
)
def test_equal_tokens_have_a_dispersion_of_exactly_zero(
    measure: str, value: float, other: float, n: int
) -> None:
    x_TD = torch.tensor([[value, other]]).repeat(n, 1)
    assert (dispersion(x_TD, torch.zeros(n, dtype=torch.long), 1, measure=measure) == 0).all()


@measures
@given(
    base=st.floats(-1e6, 1e6, width=32),
    ulps=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    features=st.integers(1, 3),
)
def test_no_rounding_makes_a_dispersion_negative(
    measure: str, base: float, ulps: list[int], features: int
) -> None:
    # Values a unit in the last place apart, where every sum is mostly rounding.
    near_T = np.float32(base) + np.spacing(np.float32(abs(base))) * np.array(ulps, np.float32)
    x_TD = torch.from_numpy(near_T)[:, None].expand(-1, features)
    found = dispersion(x_TD, torch.arange(len(ulps)) % 2, 2, measure=measure)
    assert (found >= 0).all()


@measures
def test_one_outlier_in_a_large_cluster_keeps_its_weight(measure: str) -> None:
    # n - 1 zeros and a one, n = 4096. Quartiles do not see it. Everything else by hand:
    #   mad = 2(n-1)/n^2, variance = (n-1)/n^2, gini = 2(n-1)/n^2
    n = 4096
    x_TD = torch.zeros(n, 1)
    x_TD[17] = 1.0
    exact = {
        "mad": 2 * (n - 1) / n**2,
        "variance": (n - 1) / n**2,
        "std": math.sqrt(n - 1) / n,
        "gini": 2 * (n - 1) / n**2,
        "iqr": 0.0,
    }[measure]
    found = dispersion(x_TD, torch.zeros(n, dtype=torch.long), 1, measure=measure)
    assert found.item() == pytest.approx(exact, rel=1e-5)


@measures
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_token_spoils_its_own_cluster_only(
    measure: str, bad: float, generator: torch.Generator
) -> None:
    x_TD = torch.randn(20, 3, generator=generator)
    assignment_T = torch.arange(20) % 4
    clean = dispersion(x_TD, assignment_T, 4, measure=measure)
    x_TD[6, 1] = bad  # cluster 2
    x_TD.requires_grad_()
    found = dispersion(x_TD, assignment_T, 4, measure=measure)
    others = torch.tensor([0, 1, 3])
    assert found[2].isnan().all()
    assert torch.equal(found[others], clean[others])
    found[others].sum().backward()
    assert x_TD.grad is not None
    assert x_TD.grad.isfinite().all()


@measures
@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (0, 4, 3)])
def test_no_tokens_have_no_dispersion(measure: str, shape: tuple[int, ...]) -> None:
    assignment = torch.zeros(shape[:-1], dtype=torch.long)
    found, count = dispersion_and_count(torch.zeros(shape), assignment, 2, measure=measure)
    assert torch.equal(found, torch.zeros(*shape[:-2], 2, 3))
    assert torch.equal(count, torch.zeros(*shape[:-2], 2))


@measures
def test_equal_calls_give_equal_bits_and_read_no_unwritten_memory(
    measure: str, generator: torch.Generator, poisoned_empty: None
) -> None:
    x_TD = torch.randn(500, 8, generator=generator)
    assignment_T = torch.randint(-1, 16, (500,), generator=generator)
    first = dispersion(x_TD, assignment_T, 16, measure=measure)
    assert first.isfinite().all()
    assert torch.equal(first, dispersion(x_TD, assignment_T, 16, measure=measure))
