"""Dispersion of tokens within clusters, against loops written from the definitions.

B sequences of L tokens (or T tokens), D features, C clusters.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from dispersion_cases import measures, of_tokens
from hypothesis import given
from hypothesis import strategies as st

from acmoe.ops.statistics.dispersion import dispersion, dispersion_and_count
from cases import TokenSet, loop_dispersion, spread, spread_gradient, token_sets, values_of


@measures
@given(tokens=token_sets())
def test_every_measure_is_its_definition(measure: str, tokens: TokenSet) -> None:
    x, assignment, num_clusters, mask = tokens
    found, count = dispersion_and_count(
        x, assignment, num_clusters, measure=measure, token_mask=mask
    )
    expected, tokens_in = loop_dispersion(tokens, functools.partial(spread, measure=measure))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(count, tokens_in)


@measures
@given(tokens=token_sets(ties=False), seed=st.integers(0, 99))
def test_the_gradient_is_the_hand_derived_one(measure: str, tokens: TokenSet, seed: int) -> None:
    x = tokens.x.requires_grad_()
    found = of_tokens(tokens, measure)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed)).double()
    (gradient,) = torch.autograd.grad(found, x, upstream)

    expected = torch.zeros_like(x)
    *sets, _, dim = x.shape
    for where in np.ndindex(*sets):
        for cluster, feature in itertools.product(range(tokens.num_clusters), range(dim)):
            values = values_of(tokens, where, cluster, feature)
            if values:
                own = tokens.counted[where] & (tokens.assignment[where] == cluster)
                slopes = torch.tensor(spread_gradient(values, measure), dtype=torch.float64)
                expected[where][own, feature] = slopes * upstream[(*where, cluster, feature)]
    scale = expected.abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9 * max(scale, 1e-3))


@measures
def test_gradcheck_with_padding_empty_and_single_clusters(
    measure: str, generator: torch.Generator
) -> None:
    x_BLD = torch.randn(2, 7, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    assignment_BL = torch.tensor([[0, 0, 1, 0, -1, 0, 3], [1, 1, 1, 0, 0, 3, 3]])
    mask_BL = torch.ones(2, 7, dtype=torch.bool)
    mask_BL[0, 5] = False
    of_x = functools.partial(
        dispersion, assignment=assignment_BL, num_clusters=4, measure=measure, token_mask=mask_BL
    )
    assert torch.autograd.gradcheck(of_x, x_BLD)
    if measure in ("variance", "std"):  # the others are piecewise linear
        assert torch.autograd.gradgradcheck(of_x, x_BLD)


@given(tokens=token_sets(sequences=False, clusters=(1, 2)))
def test_iqr_is_the_difference_of_numpy_quantiles(tokens: TokenSet) -> None:
    def of(values: Sequence[float]) -> float:
        return float(np.subtract(*np.quantile(values, [0.75, 0.25]))) if values else 0.0

    expected, _ = loop_dispersion(tokens, of)
    torch.testing.assert_close(of_tokens(tokens, "iqr"), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        # Cluster 0 holds (0, 1), (4, 1), (8, 7): means 4 and 3.
        # Cluster 1 holds (5, -2), (7, 2):         means 6 and 0.
        ("mad", [[8 / 3, 8 / 3], [1, 2]]),  # (4+0+4)/3, (2+2+4)/3; (1+1)/2, (2+2)/2
        ("variance", [[32 / 3, 8], [1, 4]]),  # (16+0+16)/3, (4+4+16)/3; (1+1)/2, (4+4)/2
        ("std", [[math.sqrt(32 / 3), math.sqrt(8)], [1, 2]]),
        # Over ordered pairs: 2(4+8+4)/9, 2(0+6+6)/9; 2*2/4, 2*4/4
        ("gini", [[32 / 9, 24 / 9], [1, 2]]),
        # Quartiles of 0,4,8 at places 0.5 and 1.5: 2 and 6; of 1,1,7: 1 and 4;
        # of 5,7 at places 0.25 and 0.75: 5.5 and 6.5; of -2,2: -1 and 1
        ("iqr", [[4, 3], [1, 2]]),
    ],
)
def test_two_clusters_by_hand(measure: str, expected: list[list[float]]) -> None:
    x_TD = torch.tensor([[0.0, 1.0], [5.0, -2.0], [4.0, 1.0], [7.0, 2.0], [8.0, 7.0]])
    assignment_T = torch.tensor([0, 1, 0, 1, 0])
    found = dispersion(x_TD, assignment_T, 2, measure=measure)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


@measures
@given(tokens=token_sets(sequences=False), seed=st.integers(0, 99))
def test_the_order_of_tokens_does_not_matter(measure: str, tokens: TokenSet, seed: int) -> None:
    x, assignment, num_clusters, mask = tokens
    shuffle = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    shuffled = TokenSet(
        x[shuffle], assignment[shuffle], num_clusters, None if mask is None else mask[shuffle]
    )
    torch.testing.assert_close(of_tokens(shuffled, measure), of_tokens(tokens, measure))


@measures
@given(tokens=token_sets(), seed=st.integers(0, 99))
def test_relabelling_clusters_permutes_rows(measure: str, tokens: TokenSet, seed: int) -> None:
    x, assignment, num_clusters, mask = tokens
    new_name = torch.randperm(num_clusters, generator=torch.Generator().manual_seed(seed))
    renamed = torch.where(assignment < 0, assignment, new_name[assignment])
    again = of_tokens(TokenSet(x, renamed, num_clusters, mask), measure)
    torch.testing.assert_close(again[..., new_name, :], of_tokens(tokens, measure))


@measures
@pytest.mark.parametrize("content", [math.nan, math.inf, -math.inf, 3e38, 1e-45])
@pytest.mark.parametrize("by", ["mask", "assignment"])
def test_what_an_excluded_token_holds_changes_no_bit(
    measure: str, content: float, by: str, generator: torch.Generator
) -> None:
    x_TD = torch.randn(20, 3, generator=generator)
    assignment_T = torch.arange(20) % 4
    mask_T = torch.rand(20, generator=generator) < 0.6
    if by == "assignment":
        assignment_T = assignment_T.masked_fill(~mask_T, -1)
    results = []
    for filled in (0.0, content):
        x = x_TD.masked_fill(~mask_T[:, None], filled).requires_grad_()
        found = dispersion(
            x, assignment_T, 5, measure=measure, token_mask=mask_T if by == "mask" else None
        )
        found.square().sum().backward()
        assert x.grad is not None
        assert (x.grad[~mask_T] == 0).all()
        results.append((found, x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@measures
def test_excluding_a_token_is_the_same_as_removing_it(
    measure: str, generator: torch.Generator
) -> None:
    x_TD = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    assignment_T = torch.arange(30) % 4
    mask_T = torch.rand(30, generator=generator) < 0.6
    torch.testing.assert_close(
        dispersion(x_TD, assignment_T, 4, measure=measure, token_mask=mask_T),
        dispersion(x_TD[mask_T], assignment_T[mask_T], 4, measure=measure),
    )


@measures
def test_sequences_have_statistics_of_their_own(measure: str, generator: torch.Generator) -> None:
    x_BLD = torch.randn(3, 9, 4, generator=generator)
    assignment_BL = torch.randint(-1, 3, (3, 9), generator=generator)
    mask_BL = torch.rand(3, 9, generator=generator) < 0.8
    together, count = dispersion_and_count(
        x_BLD, assignment_BL, 3, measure=measure, token_mask=mask_BL
    )
    for b in range(3):
        alone, alone_count = dispersion_and_count(
            x_BLD[b], assignment_BL[b], 3, measure=measure, token_mask=mask_BL[b]
        )
        torch.testing.assert_close(together[b], alone)
        assert torch.equal(count[b], alone_count)
    changed = x_BLD.clone()
    changed[1:] *= 100
    again = dispersion(changed, assignment_BL, 3, measure=measure, token_mask=mask_BL)
    assert torch.equal(again[0], together[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("num_clusters", [3, 200, 300])  # 200 and 300 do not fit int8 and uint8
def test_any_integer_type_names_clusters(dtype: torch.dtype, num_clusters: int) -> None:
    x_TD = torch.tensor([[0.0], [2.0], [5.0]])
    found = dispersion(x_TD, torch.tensor([0, 0, 2], dtype=dtype), num_clusters)
    assert found[:3].tolist() == [[1.0], [0.0], [0.0]]
