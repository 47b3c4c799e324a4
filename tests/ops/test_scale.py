"""The diagonals of M: by hand and against loops (test_finite_scale.py: for any tokens).

T tokens, D features, C clusters.
"""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acmoe.errors import UserError
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.scale import NORMALIZATIONS, cluster_scale, scale_from_dispersion
from cases import MEASURES, TokenSet, loop_dispersion, loop_scale, spread, token_sets
from slow_cases import mostly_slow

measures = pytest.mark.parametrize("measure", MEASURES)
normalizations = pytest.mark.parametrize("normalize", NORMALIZATIONS)

options = st.fixed_dictionaries(
    {
        "normalize": st.sampled_from(NORMALIZATIONS),
        "strength": st.none() | st.floats(1e-3, 1e3),
        "floor": st.sampled_from([1e-3, 0.5, 1e-12]),
        "eps": st.sampled_from([0.0, 1e-4, 0.35]),
        "clamp": st.sampled_from([None, 0.5, 1.5, 10.0]),
        "min_tokens": st.integers(0, 4),
    }
)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        # Cluster 0 holds (0, 0), (2, 6): means 1 and 3, mad 1 and 3, so 1/s = (1, 1/3).
        # Cluster 1 holds (0, 0), (4, 2): means 2 and 1, mad 2 and 1, so 1/s = (1/2, 1).
        # Cluster 2 holds one token: no dispersion, no preference, ones.
        # cluster: divide row 0 by (1 + 1/3)/2 = 2/3, row 1 by (1/2 + 1)/2 = 3/4.
        ({}, [[3 / 2, 1 / 2], [2 / 3, 4 / 3], [1, 1]]),
        # feature: divide column 0 by (1 + 1/2)/2 = 3/4, column 1 by (1/3 + 1)/2 = 2/3.
        ({"normalize": "feature"}, [[4 / 3, 1 / 2], [2 / 3, 3 / 2], [1, 1]]),
        # global: divide by (1 + 1/3 + 1/2 + 1)/4 = 17/24.
        ({"normalize": "global"}, [[24 / 17, 8 / 17], [12 / 17, 24 / 17], [1, 1]]),
        # Theorem 1 with lambda = 2, d = 2: w = 1/(s + alpha), sum 1.
        # Row 0: 1/(1+a) + 1/(3+a) = 1, so a^2 + 2a - 1 = 0, a = sqrt(2) - 1: w = 1/sqrt(2) and
        #        1/(2 + sqrt(2)) = 1 - 1/sqrt(2); times d: sqrt(2), 2 - sqrt(2).
        # Row 1: 1/(2+a) + 1/(1+a) = 1, so a^2 + a - 1 = 0, a = (sqrt(5) - 1)/2:
        #        w = 2/(3 + sqrt(5)) = (3 - sqrt(5))/2 and 2/(1 + sqrt(5)) = (sqrt(5) - 1)/2.
        (
            {"strength": 2.0},
            [
                [math.sqrt(2), 2 - math.sqrt(2)],
                [3 - math.sqrt(5), math.sqrt(5) - 1],
                [1, 1],
            ],
        ),
    ],
)
def test_three_clusters_by_hand(choices: dict[str, Any], expected: list[list[float]]) -> None:
    x_TD = torch.tensor([[0.0, 0.0], [2.0, 6.0], [0.0, 0.0], [4.0, 2.0], [9.0, 9.0]])
    scale_CD = cluster_scale(x_TD, torch.tensor([0, 0, 1, 1, 2]), 3, **choices)
    torch.testing.assert_close(scale_CD, torch.tensor(expected))


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        # s = (0, 3, 9), mean 4: floor 1/4 lifts the 0 to 1. 1/s = (1, 1/3, 1/9), mean 13/27.
        ({"floor": 0.25}, [27 / 13, 9 / 13, 3 / 13]),
        # 1/(s + 1) = (1, 1/4, 1/10), mean 9/20
        ({"floor": 0.0, "eps": 1.0}, [20 / 9, 5 / 9, 2 / 9]),
        # at most 2 * 9/20 = 9/10: (9/10, 1/4, 1/10), mean 5/12
        ({"floor": 0.0, "eps": 1.0, "clamp": 2.0}, [54 / 25, 3 / 5, 6 / 25]),
        # five tokens are fewer than six
        ({"min_tokens": 6}, [1.0, 1.0, 1.0]),
        # all weights cut to the same: no preference left
        ({"floor": 0.25, "clamp": 1e-9}, [1.0, 1.0, 1.0]),
    ],
)
def test_floor_eps_clamp_and_min_tokens_by_hand(
    choices: dict[str, Any], expected: list[float]
) -> None:
    s_CD = torch.tensor([[0.0, 3.0, 9.0]])
    found = scale_from_dispersion(s_CD, torch.tensor([5.0]), **choices)
    torch.testing.assert_close(found, torch.tensor([expected]))


@given(
    s=st.lists(
        st.lists(st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.5, 2.0, 700.0]), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    ),
    counts=st.lists(st.integers(0, 5), min_size=5, max_size=5),
    choices=options,
)
def test_every_option_is_its_definition(
    s: list[list[float]], counts: list[int], choices: dict[str, Any]
) -> None:
    s_CD = torch.tensor(s, dtype=torch.float64)
    count_C = torch.tensor(counts[: len(s)], dtype=torch.float32)
    expected = loop_scale(s_CD, count_C, **choices)
    found = scale_from_dispersion(s_CD, count_C, **choices)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-30)


@measures
@given(
    tokens=token_sets(sequences=False),
    normalize=st.sampled_from(NORMALIZATIONS),
    strength=st.none() | st.floats(1e-2, 1e2),
)
def test_tokens_to_scale_is_its_definition(
    measure: str, tokens: TokenSet, normalize: str, strength: float | None
) -> None:
    x, assignment, num_clusters, mask = tokens
    found = cluster_scale(
        x,
        assignment,
        num_clusters,
        measure=measure,
        normalize=normalize,
        strength=strength,
        token_mask=mask,
    )
    s_CD, count_C = loop_dispersion(tokens, functools.partial(spread, measure=measure))
    s_CD = s_CD.masked_fill(s_CD < 1e-13, 0.0)  # 0.1 + 0.1 + 0.1 over 3 is not 0.1 in the loop
    expected = loop_scale(s_CD, count_C, normalize=normalize, strength=strength)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-30)


def test_every_sequence_has_its_own_scale(generator: torch.Generator) -> None:
    x_BLD = torch.randn(3, 8, 4, generator=generator, dtype=torch.float64)
    assignment_BL = torch.randint(-1, 2, (3, 8), generator=generator)
    for normalize, strength in itertools.product(NORMALIZATIONS, (None, 0.7)):
        choices: dict[str, Any] = {"normalize": normalize, "strength": strength}
        together = cluster_scale(x_BLD, assignment_BL, 2, **choices)
        alone = [cluster_scale(x_BLD[b], assignment_BL[b], 2, **choices) for b in range(3)]
        torch.testing.assert_close(together, torch.stack(alone))


@measures
@normalizations
@mostly_slow("strength", [None, 0.5])
def test_gradcheck_from_tokens_to_scale(
    measure: str, normalize: str, strength: float | None, generator: torch.Generator
) -> None:
    x_TD = torch.randn(9, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    of_x = functools.partial(
        cluster_scale,
        assignment=torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, -1]),
        num_clusters=4,
        measure=measure,
        normalize=normalize,
        strength=strength,
        token_mask=torch.arange(9) != 3,
    )
    assert torch.autograd.gradcheck(of_x, x_TD)


@normalizations
@pytest.mark.parametrize("choices", [{"eps": 0.35, "clamp": 1.1}, {"floor": 0.8}])
def test_gradcheck_of_the_options(
    normalize: str, choices: dict[str, Any], generator: torch.Generator
) -> None:
    s_CD = 0.1 + torch.rand(4, 3, dtype=torch.float64, generator=generator)
    of_s = functools.partial(
        scale_from_dispersion,
        count=torch.tensor([5.0, 1.0, 2.0, 0.0]),
        normalize=normalize,
        **choices,
    )
    assert torch.autograd.gradcheck(of_s, s_CD.requires_grad_())


@given(tokens=token_sets(sequences=False), strength=st.none() | st.floats(1e-2, 1e2))
def test_weights_average_one_over_what_normalize_names(
    tokens: TokenSet, strength: float | None
) -> None:
    x, assignment, num_clusters, mask = tokens
    for normalize, over in (("cluster", (-1,)), ("feature", (-2,)), ("global", (-2, -1))):
        scale_CD = cluster_scale(
            x, assignment, num_clusters, normalize=normalize, strength=strength, token_mask=mask
        )
        mean = scale_CD.mean(over)
        torch.testing.assert_close(mean, torch.ones_like(mean))


def test_min_tokens_zero_counts_an_empty_cluster_as_one_of_no_dispersion() -> None:
    # s = (1, 1) and, empty, (0, 0); 1/(s + 1) = 1/2 and 1; each feature's mean 3/4.
    s_CD = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    found = scale_from_dispersion(
        s_CD, torch.tensor([4.0, 0.0]), normalize="feature", eps=1.0, min_tokens=0
    )
    torch.testing.assert_close(found, torch.tensor([[2 / 3, 2 / 3], [4 / 3, 4 / 3]]))


@measures
def test_the_unit_of_the_tokens_does_not_matter(measure: str, generator: torch.Generator) -> None:
    x_TD = torch.randn(40, 5, generator=generator)
    assignment_T = torch.arange(40) % 3
    plain = cluster_scale(x_TD, assignment_T, 3, measure=measure)
    # 2^20 changes exponents only, so not even a bit may differ.
    assert torch.equal(plain, cluster_scale(x_TD * 2.0**20, assignment_T, 3, measure=measure))


def test_equal_dispersions_leave_the_router_unchanged() -> None:
    # Cluster 0 at (+-1, +-1), cluster 1 at (10 +- 3, +-3): as wide along one feature as another.
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    x_TD = torch.cat([corners, 3 * corners + torch.tensor([10.0, 0.0])])
    scale_CD = cluster_scale(x_TD, torch.tensor([0] * 4 + [1] * 4), 2)
    assert torch.equal(scale_CD, torch.ones(2, 2))


def test_strength_runs_from_the_tightest_features_to_the_plain_router(
    generator: torch.Generator,
) -> None:
    x_TD = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    x_TD = x_TD * torch.tensor([0.1, 1.0, 2.0, 5.0])
    assignment_T = torch.zeros(60, dtype=torch.long)
    s_CD, _ = dispersion_and_count(x_TD, assignment_T, 1)
    harmonic = (1 / (1 / s_CD).mean()).item()

    def scale(strength: float | None) -> Tensor:
        return cluster_scale(x_TD, assignment_T, 1, strength=strength)

    torch.testing.assert_close(scale(1e9), torch.ones(1, 4, dtype=torch.float64), rtol=0, atol=1e-7)
    torch.testing.assert_close(scale(harmonic), scale(None))
    tightest = torch.tensor([[4.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(scale(1e-9), tightest, rtol=0, atol=1e-7)


def test_sixteen_bit_tokens_get_a_float32_scale(generator: torch.Generator) -> None:
    x_TD = torch.randn(30, 4, generator=generator).bfloat16()
    assignment_T = torch.arange(30) % 3
    found = cluster_scale(x_TD, assignment_T, 3, strength=0.3)
    assert found.dtype == torch.float32
    assert torch.equal(found, cluster_scale(x_TD.float(), assignment_T, 3, strength=0.3))


# The compiler itself makes an instance of a torch.autograd.Function while it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow  # the graph of a layer holds it, too
@pytest.mark.parametrize("strength", [None, 0.5])
def test_one_graph_of_the_compiler_holds_the_whole_scale(
    strength: float | None, generator: torch.Generator
) -> None:
    def scale(x_TD: Tensor, assignment_T: Tensor) -> Tensor:
        return cluster_scale(x_TD, assignment_T, 3, strength=strength)

    compiled = torch.compile(scale, fullgraph=True, backend="aot_eager")
    x_TD = torch.randn(30, 4, generator=generator, requires_grad=True)
    assignment_T = torch.randint(-1, 3, (30,), generator=generator)
    upstream = torch.randn(3, 4, generator=generator)
    found, expected = compiled(x_TD, assignment_T), scale(x_TD, assignment_T)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, x_TD, upstream), torch.autograd.grad(expected, x_TD, upstream)
    )


def test_floor_and_min_tokens_of_tokens_by_hand() -> None:
    # One cluster of mad (0, 1, 2), mean 1: with floor f its weights are 1 / max(s, f).
    x = torch.tensor([[5.0, 0.0, 0.0], [5.0, 2.0, 4.0]])
    for floor in (1e-3, 0.25, 1.5):
        weight = 1 / torch.tensor([max(s, floor) for s in (0.0, 1.0, 2.0)])
        found = cluster_scale(x, torch.tensor([0, 0]), 1, floor=floor)
        torch.testing.assert_close(found[0], weight / weight.mean())
    default = cluster_scale(x, torch.tensor([0, 0]), 1)
    assert torch.equal(default, cluster_scale(x, torch.tensor([0, 0]), 1, floor=1e-3))
    few = cluster_scale(x, torch.tensor([0, 0]), 1, min_tokens=3)
    assert torch.equal(few, torch.ones(1, 3))
    with pytest.raises(UserError, match="floor=0"):
        cluster_scale(x, torch.tensor([0, 0]), 1, floor=0)
    with pytest.raises(UserError, match="min_tokens=0"):
        cluster_scale(x, torch.tensor([0, 0]), 1, min_tokens=0)
