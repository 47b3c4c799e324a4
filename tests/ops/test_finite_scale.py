"""The diagonals of M are finite and positive whatever comes in, and so are their gradients.

T tokens, D features, C clusters.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acmoe.ops.statistics.scale import NORMALIZATIONS, cluster_scale, scale_from_dispersion
from cases import MEASURES

measures = pytest.mark.parametrize("measure", MEASURES)
normalizations = pytest.mark.parametrize("normalize", NORMALIZATIONS)


def usable(scale: Tensor) -> bool:
    return bool((torch.isfinite(scale) & (scale > 0)).all())


any_float32 = st.floats(allow_nan=False, allow_infinity=False, width=32)


any_float64 = st.floats(allow_nan=False, allow_infinity=False)


@measures
@given(
    rows=st.lists(st.tuples(any_float32, any_float32), min_size=0, max_size=8),
    normalize=st.sampled_from(NORMALIZATIONS),
    strength=st.sampled_from([None, 1e-6, 1.0, 1e6]),
)
def test_any_finite_tokens_give_a_finite_positive_scale(
    measure: str, rows: list[tuple[float, float]], normalize: str, strength: float | None
) -> None:
    x_TD = torch.tensor(rows, dtype=torch.float32).view(-1, 2)
    scale_CD = cluster_scale(
        x_TD,
        torch.arange(len(rows)) % 2,
        3,
        measure=measure,
        normalize=normalize,
        strength=strength,
    )
    assert usable(scale_CD)


@given(
    s=st.lists(st.tuples(*[any_float64.map(abs)] * 3), min_size=1, max_size=4),
    normalize=st.sampled_from(NORMALIZATIONS),
    strength=st.sampled_from([None, 5e-324, 1e-300, 1.0, 1e300, 1.7e308]),
    floor=st.sampled_from([0.0, 1e-3]),
)
def test_any_finite_dispersion_gives_a_finite_positive_scale(
    s: list[tuple[float, ...]], normalize: str, strength: float | None, floor: float
) -> None:
    s_CD = torch.tensor(s, dtype=torch.float64)
    count_C = torch.full((len(s),), 2.0)
    scale_CD = scale_from_dispersion(
        s_CD, count_C, normalize=normalize, strength=strength, floor=floor
    )
    assert usable(scale_CD)


@pytest.mark.parametrize(
    "s",
    [
        [[5e-324, 1e-323]],
        [[5e-324, 1.0]],
        [[0.0, 1.7e308]],
        [[1.7e308, 1.7e308]],  # their sum overflows: no preference
        [[1e-300, 1e-300], [1e300, 1e300]],
    ],
)
@normalizations
@pytest.mark.parametrize("strength", [None, 5e-324, 1.0, 1.7e308])
def test_the_ends_of_float64_give_a_finite_positive_scale(
    s: list[list[float]], normalize: str, strength: float | None
) -> None:
    s_CD = torch.tensor(s, dtype=torch.float64)
    scale_CD = scale_from_dispersion(
        s_CD, torch.full((len(s),), 9.0), normalize=normalize, strength=strength, floor=0.0
    )
    assert usable(scale_CD)


@measures
@normalizations
@pytest.mark.parametrize("largest", [2e-45, 1e-40, 1e-38, 1e18, 1e30, 3e38])
def test_the_ends_of_float32_give_a_finite_positive_scale(
    measure: str, normalize: str, largest: float
) -> None:
    x_TD = torch.tensor([[1.0, 0.5, 0.0], [-1.0, 0.1, 1.0], [0.0, 0.2, 1.0], [1.0, 1.0, 1.0]])
    x_TD = (x_TD.double() * largest).float()
    scale_CD = cluster_scale(
        x_TD, torch.tensor([0, 0, 1, 1]), 2, measure=measure, normalize=normalize
    )
    assert usable(scale_CD)


@measures
@normalizations
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_token_turns_its_cluster_to_ones(
    measure: str, normalize: str, bad: float, generator: torch.Generator
) -> None:
    x_TD = torch.randn(20, 3, generator=generator)
    assignment_T = torch.arange(20) % 4
    x_TD[6, 1] = bad  # cluster 2
    x_TD.requires_grad_()
    scale_CD = cluster_scale(x_TD, assignment_T, 4, measure=measure, normalize=normalize)
    without = torch.tensor([0, 1, 3])
    kept_T = assignment_T != 2
    expected = cluster_scale(
        x_TD.detach()[kept_T], assignment_T[kept_T], 4, measure=measure, normalize=normalize
    )
    assert (scale_CD[2] == 1).all()
    torch.testing.assert_close(scale_CD[without], expected[without])
    scale_CD.square().sum().backward()
    assert x_TD.grad is not None
    assert x_TD.grad.isfinite().all()


@measures
@normalizations
@pytest.mark.parametrize("strength", [None, 0.5])
def test_clusters_that_tell_nothing_get_ones(
    measure: str, normalize: str, strength: float | None
) -> None:
    x_TD = torch.tensor([[0.1, 0.2, 1000.1]]).repeat(10, 1)
    x_TD[8:] = torch.tensor([[1.0, 2.0, 3.0], [2.0, 9.0, 7.0]])
    # cluster 0: seven equal tokens; cluster 1: one token; cluster 2: two; cluster 3: none
    assignment_T = torch.tensor([0] * 7 + [1] + [2] * 2)
    scale_CD = cluster_scale(
        x_TD, assignment_T, 4, measure=measure, normalize=normalize, strength=strength
    )
    assert (scale_CD[[0, 1, 3]] == 1).all()
    if normalize != "feature":  # where the only cluster that speaks averages one with itself
        assert (scale_CD[2] != 1).any()


@measures
def test_constant_features_and_padding_leave_every_gradient_finite(
    measure: str, generator: torch.Generator
) -> None:
    x_TD = torch.randn(12, 4, generator=generator)
    x_TD[:, 1] = 0.1
    x_TD[9:] = math.nan
    x_TD.requires_grad_()
    scale_CD = cluster_scale(
        x_TD, torch.arange(12) % 2, 3, measure=measure, token_mask=torch.arange(12) < 9
    )
    scale_CD.square().sum().backward()
    assert usable(scale_CD)
    assert x_TD.grad is not None
    assert x_TD.grad.isfinite().all()
    assert (x_TD.grad[9:] == 0).all()


def test_no_feature_exceeds_the_floor(generator: torch.Generator) -> None:
    # s >= mean(s)/1000, hence a feature weighs at most 1000 d times what the widest one weighs:
    # that one has s <= d mean(s).
    x_TD = torch.randn(50, 6, generator=generator) * torch.tensor([0.0, 1e-9, 1e-3, 1.0, 1e3, 1e6])
    scale_CD = cluster_scale(x_TD, torch.arange(50) % 2, 2)
    ratio = scale_CD.amax(-1) / scale_CD.amin(-1)
    assert (ratio <= 6000.01).all()
    # The first four lie below the floor of about 1000 and share the largest weight.
    torch.testing.assert_close(scale_CD[:, 0], scale_CD[:, 2])
