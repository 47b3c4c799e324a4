"""The error of M if each process measures dispersions about its own means: a simulation."""

import pytest
import torch

from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.scale import scale_from_dispersion

RANKS, DIM = 64, 256


@pytest.mark.parametrize(
    ("tokens", "pooled", "alone"), [(16, 0.006, 0.15), (64, 0.0015, 0.08)], ids=["16", "64"]
)
def test_pooled_statistics_are_off_by_far_less_than_those_of_one_process(
    tokens: int, pooled: float, alone: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    spread_D = 0.1 + torch.rand(DIM, generator=generator)
    x_RTD = torch.randn(RANKS, tokens, DIM, generator=generator) * spread_D
    cluster_RT = torch.zeros(RANKS, tokens, dtype=torch.int64)
    own_RCD, count_RC = dispersion_and_count(x_RTD, cluster_RT, 1)
    mean_CD = (own_RCD * count_RC[..., None]).sum(0) / count_RC.sum(0)[:, None]
    exact = scale_from_dispersion(
        *dispersion_and_count(x_RTD.flatten(0, 1), cluster_RT.flatten(), 1)
    )

    def error(scale_CD: torch.Tensor) -> float:
        return float(((scale_CD - exact).abs() / exact).mean())

    together = error(scale_from_dispersion(mean_CD, count_RC.sum(0)))
    assert together == pytest.approx(pooled, rel=0.25)
    assert error(scale_from_dispersion(own_RCD[0], count_RC[0])) == pytest.approx(alone, rel=0.25)
