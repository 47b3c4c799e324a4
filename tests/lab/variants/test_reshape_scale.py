"""Powers and parts of M, against loops over clusters and features in float64.

C clusters, D features.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acmoe.lab.variants.scale import reshape_scale
from acmoe.ops.statistics.scale import scale_from_dispersion

cases = {
    "clusters": st.integers(1, 5),
    "dim": st.integers(1, 6),
    "seed": st.integers(0, 999),
}
powers = st.sampled_from([0.1, 0.5, 0.75, 1.0])
normalizations = st.sampled_from(["cluster", "feature", "global"])


def drawn(clusters: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """The dispersion of clusters, and their tokens: some have none, or one."""
    generator = torch.Generator().manual_seed(seed)
    s_CD = torch.rand(clusters, dim, generator=generator, dtype=torch.float64) + 0.05
    return s_CD, torch.randint(0, 5, (clusters,), generator=generator).double()


def normalized(weight: dict[int, list[float]], normalize: str) -> dict[int, list[float]]:
    """Weights of occupied clusters over their mean, as the normalisation says."""
    rows = list(weight.values())
    dim = len(rows[0]) if rows else 0
    found = {}
    for c, row in weight.items():
        if normalize == "cluster":
            means = [math.fsum(row) / dim] * dim
        elif normalize == "global":
            means = [math.fsum(map(math.fsum, rows)) / (dim * len(rows))] * dim
        else:
            means = [math.fsum(other[q] for other in rows) / len(rows) for q in range(dim)]
        found[c] = [value / mean for value, mean in zip(row, means, strict=True)]
    return found


def as_matrix(found: dict[int, list[float]], clusters: int, dim: int) -> Tensor:
    rows = [found.get(c, [1.0] * dim) for c in range(clusters)]
    return torch.tensor(rows, dtype=torch.float64)


@given(**cases, power=powers, normalize=normalizations)
def test_a_power_of_the_scale_is_that_power_of_the_reciprocal_dispersion(
    clusters: int, dim: int, seed: int, power: float, normalize: str
) -> None:
    s_CD, count_C = drawn(clusters, dim, seed)
    scale_CD = scale_from_dispersion(s_CD, count_C, normalize=normalize, floor=0.0)
    found = reshape_scale(scale_CD, count_C >= 2, power=power, normalize=normalize)
    weight = {
        c: [value**-power for value in s_CD[c].tolist()] for c in range(clusters) if count_C[c] >= 2
    }
    torch.testing.assert_close(
        found, as_matrix(normalized(weight, normalize), clusters, dim), rtol=1e-10, atol=0.0
    )


@given(**cases, normalize=normalizations)
def test_parts_equal_a_loop_over_logarithms(
    clusters: int, dim: int, seed: int, normalize: str
) -> None:
    s_CD, count_C = drawn(clusters, dim, seed)
    scale_CD = scale_from_dispersion(s_CD, count_C, normalize=normalize)
    occupied = [c for c in range(clusters) if count_C[c] >= 2]
    logs = {c: [math.log(value) for value in scale_CD[c].tolist()] for c in occupied}
    mean = [math.fsum(row[q] for row in logs.values()) / max(1, len(occupied)) for q in range(dim)]
    own = {
        c: [math.exp(value - common) for value, common in zip(row, mean, strict=True)]
        for c, row in logs.items()
    }
    found = reshape_scale(scale_CD, count_C >= 2, part="own", normalize=normalize)
    wanted = as_matrix(normalized(own, normalize), clusters, dim)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0.0)

    every = {c: [math.exp(value) for value in mean] for c in range(clusters)}
    found = reshape_scale(scale_CD, count_C >= 2, part="common", normalize=normalize)
    wanted = as_matrix(normalized(every, normalize), clusters, dim)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0.0)
    assert (found == found[:1]).all()  # no cluster differs from another, occupied or not


@given(**cases)
def test_the_product_of_both_parts_is_the_scale_up_to_one_factor_a_cluster(
    clusters: int, dim: int, seed: int
) -> None:
    s_CD, count_C = drawn(clusters, dim, seed)
    scale_CD = scale_from_dispersion(s_CD, count_C)
    occupied_C = count_C >= 2
    common_CD, own_CD = (
        reshape_scale(scale_CD, occupied_C, part=part) for part in ("common", "own")
    )
    ratio_CD = (common_CD * own_CD / scale_CD)[occupied_C]
    torch.testing.assert_close(ratio_CD, ratio_CD[:, :1].expand_as(ratio_CD), rtol=1e-10, atol=0.0)


@given(**cases, first=powers, second=powers, part=st.sampled_from(["both", "common", "own"]))
def test_powers_compose(
    clusters: int, dim: int, seed: int, first: float, second: float, part: str
) -> None:
    s_CD, count_C = drawn(clusters, dim, seed)
    scale_CD = scale_from_dispersion(s_CD, count_C)
    occupied_C = count_C >= 2
    once = reshape_scale(scale_CD, occupied_C, power=first * second, part=part)
    twice = reshape_scale(
        reshape_scale(scale_CD, occupied_C, power=first, part=part), occupied_C, power=second
    )
    # "common" reaches clusters that are not occupied, which a second power leaves at one.
    torch.testing.assert_close(once[occupied_C], twice[occupied_C], rtol=1e-10, atol=0.0)


def test_with_the_defaults_the_scale_is_handed_back_itself() -> None:
    scale_CD = torch.rand(3, 4)
    assert reshape_scale(scale_CD, torch.ones(3) > 0) is scale_CD


@pytest.mark.parametrize("part", ["common", "own"])
def test_where_no_cluster_is_occupied_every_part_is_one(part: str) -> None:
    found = reshape_scale(torch.ones(3, 4), torch.zeros(3) > 0, part=part)
    assert torch.equal(found, torch.ones(3, 4))


def test_one_occupied_cluster_has_nothing_of_its_own() -> None:
    scale_CD = torch.tensor([[1.6, 0.4], [1.0, 1.0]])
    occupied_C = torch.tensor([True, False])
    assert torch.equal(reshape_scale(scale_CD, occupied_C, part="own"), torch.ones(2, 2))
    common = reshape_scale(scale_CD, occupied_C, part="common")
    torch.testing.assert_close(common, torch.tensor([[1.6, 0.4], [1.6, 0.4]]))


@pytest.mark.parametrize("part", ["both", "common", "own"])
def test_the_gradient_of_a_reshaped_scale_is_that_of_finite_differences(part: str) -> None:
    s_CD, _ = drawn(3, 4, 0)
    occupied_C = torch.tensor([True, True, False])

    def reshaped(s_CD: Tensor) -> Tensor:
        scale_CD = scale_from_dispersion(s_CD, torch.tensor([5.0, 5.0, 0.0]))
        return reshape_scale(scale_CD, occupied_C, power=0.5, part=part)

    assert torch.autograd.gradcheck(reshaped, (s_CD.requires_grad_(),))
