"""Dispersion of tokens within clusters (B, C, D), in plain PyTorch: the kernels' specification.

Every function takes finite x_BLD in its accumulation dtype (float32 or float64), and cluster ids
(B, L), where the id C means "in no cluster" (padding, first layer). Sums over tokens are GEMMs with
a one-hot matrix: no atomics, so equal inputs give equal bits.

B independent sets of tokens, L tokens in each, D features, C clusters.
"""

import torch
from torch import Tensor

MEASURES = ("mad", "variance", "std", "gini", "iqr")


def membership(cluster_BL: Tensor, num_clusters: int, dtype: torch.dtype) -> Tensor:
    """Return the (B, L, C) one-hot matrix; a token in no cluster has a row of zeros."""
    ids_C = torch.arange(num_clusters, device=cluster_BL.device)
    return (cluster_BL[..., None] == ids_C).to(dtype)


def mean_per_cluster(value_BLD: Tensor, member_BLC: Tensor) -> Tensor:
    """Return the (B, C, D) mean of each cluster; 0 for an empty cluster."""
    count_BC1 = member_BLC.sum(1)[..., None]
    return member_BLC.mT @ value_BLD / count_BC1.clamp(min=1)


def deviation(x_BLD: Tensor, cluster_BL: Tensor, member_BLC: Tensor) -> Tensor:
    """Return (B, L, D): each token minus the mean of its cluster.

    The mean is computed relative to one token of the cluster, the anchor: where all tokens are
    equal every deviation is exactly 0, and a large common offset costs no precision. Shifting all
    tokens does not change a deviation, so the anchor needs no gradient.
    """
    D = x_BLD.shape[2]
    # A token in no cluster gathers from the last cluster, but has weight 0 in member_BLC.
    own_BL = cluster_BL.clamp(max=member_BLC.shape[2] - 1)
    anchor_BL1 = member_BLC.argmax(1).gather(1, own_BL)[..., None]
    shifted_BLD = x_BLD - x_BLD.detach().gather(1, anchor_BL1.expand(-1, -1, D))
    mean_BCD = mean_per_cluster(shifted_BLD, member_BLC)
    return shifted_BLD - mean_BCD.gather(1, own_BL[..., None].expand(-1, -1, D))


def mad(x_BLD: Tensor, cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """Mean absolute deviation from the cluster's mean (Definition 1)."""
    member_BLC = membership(cluster_BL, num_clusters, x_BLD.dtype)
    return mean_per_cluster(deviation(x_BLD, cluster_BL, member_BLC).abs(), member_BLC)


def variance(x_BLD: Tensor, cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """Population variance in two passes: a difference of large squares would cancel."""
    member_BLC = membership(cluster_BL, num_clusters, x_BLD.dtype)
    return mean_per_cluster(deviation(x_BLD, cluster_BL, member_BLC).square(), member_BLC)


def std(x_BLD: Tensor, cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """Standard deviation, with gradient 0 for a constant feature."""
    variance_BCD = variance(x_BLD, cluster_BL, num_clusters)
    # The square root has no derivative at 0: a constant feature gets gradient 0, not inf * 0.
    constant = variance_BCD == 0
    return torch.where(constant, 1.0, variance_BCD).sqrt().masked_fill(constant, 0.0)


def sort_within_clusters(x_BLD: Tensor, cluster_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each feature by (cluster, value); return values (B, L, D) and sorted clusters (B, L)."""
    by_value_BLD = x_BLD.detach().argsort(dim=1)
    cluster_BLD = cluster_BL[..., None].expand_as(x_BLD).gather(1, by_value_BLD)
    by_cluster_BLD = cluster_BLD.argsort(dim=1, stable=True)
    permutation_BLD = by_value_BLD.gather(1, by_cluster_BLD)
    return x_BLD.gather(1, permutation_BLD), cluster_BL.sort(dim=1).values


def gini(x_BLD: Tensor, cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """Mean |x_i - x_j| over all ordered pairs of a cluster: s of Theorem 1, in O(n log n).

    Sort a cluster's n values. A gap between two neighbours with r values below and n-r above is
    inside r(n-r) pairs, so the mean is a weighted sum of gaps: never negative, and 0 for equal
    values.
    """
    sorted_BLD, cluster_BL = sort_within_clusters(x_BLD, cluster_BL)
    member_BLC = membership(cluster_BL, num_clusters, x_BLD.dtype)
    count_BC = member_BLC.sum(1)
    first_BC = count_BC.cumsum(1) - count_BC
    position_L = torch.arange(x_BLD.shape[1], device=x_BLD.device, dtype=x_BLD.dtype)
    below_BL = position_L - (member_BLC * first_BC[:, None]).sum(-1)
    size_BL = (member_BLC * count_BC[:, None]).sum(-1)
    share_BL1 = (below_BL / size_BL.clamp(min=1))[..., None]
    gap_BLD = torch.diff(sorted_BLD, dim=1, prepend=sorted_BLD[:, :1])
    # The first value of a cluster has share 0, so the gap to the previous cluster has weight 0.
    return 2 * (member_BLC.mT @ (share_BL1 * (1 - share_BL1) * gap_BLD))


def iqr(x_BLD: Tensor, cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """Interquartile range; quantiles are interpolated linearly between order statistics."""
    sorted_BLD, cluster_BL = sort_within_clusters(x_BLD, cluster_BL)
    count_BC = membership(cluster_BL, num_clusters, x_BLD.dtype).sum(1)
    first_BC = count_BC.cumsum(1) - count_BC
    span_BC = (count_BC - 1).clamp(min=0)
    last_BC = (first_BC + span_BC).clamp(max=x_BLD.shape[1] - 1)

    def quantile(share: float) -> Tensor:
        position_BC = (first_BC + share * span_BC).clamp(max=x_BLD.shape[1] - 1)
        low_BC = position_BC.floor()
        high_BC = torch.minimum(low_BC + 1, last_BC)
        low_BCD, high_BCD = (
            sorted_BLD.gather(1, index_BC.long()[..., None].expand(-1, -1, x_BLD.shape[2]))
            for index_BC in (low_BC, high_BC)
        )
        return low_BCD + (position_BC - low_BC)[..., None] * (high_BCD - low_BCD)

    empty_BC1 = (count_BC == 0)[..., None]
    return (quantile(0.75) - quantile(0.25)).masked_fill(empty_BC1, 0.0)


def cluster_count(cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """Return the (B, C) number of tokens per cluster, float32."""
    return membership(cluster_BL, num_clusters, torch.float32).sum(1)
