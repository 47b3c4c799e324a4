"""The common and the own part of log M.

C clusters, D features.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acmoe.ops.statistics.log_scale import split_log_scale
from acmoe.ops.statistics.scale import scale_from_dispersion

cases = {
    "clusters": st.integers(1, 5),
    "dim": st.integers(1, 6),
    "seed": st.integers(0, 999),
}


def drawn(clusters: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """The dispersion of clusters, and their tokens: some have none, or one."""
    generator = torch.Generator().manual_seed(seed)
    s_CD = torch.rand(clusters, dim, generator=generator, dtype=torch.float64) + 0.05
    return s_CD, torch.randint(0, 5, (clusters,), generator=generator).double()


@given(**cases)
def test_the_parts_sum_to_the_logarithm_and_the_own_ones_to_nothing(
    clusters: int, dim: int, seed: int
) -> None:
    s_CD, count_C = drawn(clusters, dim, seed)
    scale_CD = scale_from_dispersion(s_CD, count_C)
    occupied_C = count_C >= 2
    common_D, own_CD = split_log_scale(scale_CD, occupied_C)
    assert (own_CD[~occupied_C] == 0).all()
    together = (common_D + own_CD)[occupied_C]
    torch.testing.assert_close(together, scale_CD[occupied_C].log(), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(own_CD.sum(0), torch.zeros_like(common_D), rtol=0.0, atol=1e-12)
