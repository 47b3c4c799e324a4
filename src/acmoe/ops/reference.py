"""Dispersion of tokens within clusters, in plain PyTorch: the specification of the kernels.

Every function takes x_BLD in its accumulation dtype (float32 or float64), finite wherever
cluster_BL < C, and cluster ids where C itself means "in no cluster" (padding, first layer).
Sums over tokens are products with a one-hot matrix: no atomics, so equal inputs give equal bits.

B independent sets of tokens, L tokens in each, D features, C clusters.
"""

import torch
from torch import Tensor

MEASURES = ("mad", "variance", "std", "gini", "iqr")


def membership(cluster_BL: Tensor, num_clusters: int, dtype: torch.dtype) -> Tensor:
    """(B, L, C) one-hot rows; a row of zeros for a token in no cluster."""
    ids_C = torch.arange(num_clusters, device=cluster_BL.device)
    return (cluster_BL[..., None] == ids_C).to(dtype)


def mean_per_cluster(value_BLD: Tensor, member_BLC: Tensor) -> Tensor:
    """(B, C, D) means; 0 for an empty cluster."""
    count_BC1 = member_BLC.sum(1)[..., None]
    return member_BLC.mT @ value_BLD / count_BC1.clamp(min=1)


def deviation(x_BLD: Tensor, cluster_BL: Tensor, member_BLC: Tensor) -> Tensor:
    """(B, L, D) each token minus the mean of its cluster."""
    mean_BCD = mean_per_cluster(x_BLD, member_BLC)
    # A token in no cluster reads the last mean; its row of member_BLC is zero: it counts nowhere.
    own_BL1 = cluster_BL.clamp(max=mean_BCD.shape[1] - 1)[..., None]
    return x_BLD - mean_BCD.gather(1, own_BL1.expand_as(x_BLD))


def mad(x_BLD: Tensor, cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """Mean absolute deviation from the cluster's mean (Definition 1)."""
    member_BLC = membership(cluster_BL, num_clusters, x_BLD.dtype)
    return mean_per_cluster(deviation(x_BLD, cluster_BL, member_BLC).abs(), member_BLC)


def variance(x_BLD: Tensor, cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """Population variance, two passes: a difference of large squares would cancel."""
    member_BLC = membership(cluster_BL, num_clusters, x_BLD.dtype)
    return mean_per_cluster(deviation(x_BLD, cluster_BL, member_BLC).square(), member_BLC)


def std(x_BLD: Tensor, cluster_BL: Tensor, num_clusters: int) -> Tensor:
    variance_BCD = variance(x_BLD, cluster_BL, num_clusters)
    # The square root has no slope at 0: a constant feature gets the gradient 0, not inf * 0.
    constant = variance_BCD == 0
    return torch.where(constant, 1.0, variance_BCD).sqrt().masked_fill(constant, 0.0)


def sort_within_clusters(x_BLD: Tensor, cluster_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Each feature's values ordered by (cluster, value), and the clusters in that order (B, L)."""
    by_value_BLD = x_BLD.detach().argsort(dim=1)
    cluster_BLD = cluster_BL[..., None].expand_as(x_BLD).gather(1, by_value_BLD)
    by_cluster_BLD = cluster_BLD.argsort(dim=1, stable=True)
    order_BLD = by_value_BLD.gather(1, by_cluster_BLD)
    return x_BLD.gather(1, order_BLD), cluster_BL.sort(dim=1).values


def gini(x_BLD: Tensor, cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """Mean |x_i - x_j| over all ordered pairs of a cluster: s of Theorem 1, in O(n log n).

    The r-th smallest of n values (r from 0) is the larger one in r pairs and the smaller one in
    n-1-r, so it enters the sum over unordered pairs 2r+1-n times.
    """
    sorted_BLD, cluster_BL = sort_within_clusters(x_BLD, cluster_BL)
    member_BLC = membership(cluster_BL, num_clusters, x_BLD.dtype)
    count_BC = member_BLC.sum(1)
    first_BC = count_BC.cumsum(1) - count_BC
    position_L = torch.arange(x_BLD.shape[1], device=x_BLD.device, dtype=x_BLD.dtype)
    rank_BL = position_L - (member_BLC * first_BC[:, None]).sum(-1)
    size_BL = (member_BLC * count_BC[:, None]).sum(-1)
    times_BL1 = (2 * rank_BL + 1 - size_BL)[..., None]
    pairs_BC1 = count_BC[..., None].clamp(min=1) ** 2
    return 2 * (member_BLC.mT @ (times_BL1 * sorted_BLD)) / pairs_BC1


def iqr(x_BLD: Tensor, cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """Interquartile range, quantiles interpolated linearly between order statistics."""
    sorted_BLD, cluster_BL = sort_within_clusters(x_BLD, cluster_BL)
    count_BC = membership(cluster_BL, num_clusters, x_BLD.dtype).sum(1)
    first_BC = count_BC.cumsum(1) - count_BC
    span_BC = (count_BC - 1).clamp(min=0)
    last_BC = (first_BC + span_BC).clamp(max=x_BLD.shape[1] - 1)

    def quantile(share: float) -> Tensor:
        place_BC = (first_BC + share * span_BC).clamp(max=x_BLD.shape[1] - 1)
        low_BC = place_BC.floor()
        high_BC = torch.minimum(low_BC + 1, last_BC)
        low_BCD, high_BCD = (
            sorted_BLD.gather(1, at.long()[..., None].expand(-1, -1, x_BLD.shape[2]))
            for at in (low_BC, high_BC)
        )
        return low_BCD + (place_BC - low_BC)[..., None] * (high_BCD - low_BCD)

    empty_BC1 = (count_BC == 0)[..., None]
    return (quantile(0.75) - quantile(0.25)).masked_fill(empty_BC1, 0.0)


def cluster_count(cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """(B, C) float32 tokens per cluster."""
    return membership(cluster_BL, num_clusters, torch.float32).sum(1)
