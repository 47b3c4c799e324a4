"""Means of clusters against a loop, with padding and tokens that are no numbers."""

import math

import torch

from acmoe.ops.statistics.cluster_mean import cluster_mean


def test_means_equal_a_loop_and_bad_tokens_count_nowhere(generator: torch.Generator) -> None:
    value_TX = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    cluster_T = torch.randint(-1, 4, (20,), generator=generator)
    mask_T = torch.arange(20) < 17
    value_TX[0, 1], value_TX[1, 2], value_TX[18] = math.nan, math.inf, math.nan
    mean_CX, count_C = cluster_mean(value_TX, cluster_T, 5, mask_T)
    for c in range(5):
        rows = [value_TX[t] for t in range(2, 17) if cluster_T[t] == c]
        wanted = sum(rows) / len(rows) if rows else torch.zeros(3, dtype=torch.float64)
        torch.testing.assert_close(mean_CX[c], wanted)
        assert count_C[c] == len(rows)
    assert count_C[4] == 0  # cluster 4 is never drawn
