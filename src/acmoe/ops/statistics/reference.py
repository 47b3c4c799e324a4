"""Dispersion of tokens within clusters (B, C, D), in plain PyTorch: the kernels' specification.

Every function takes finite x_BLD in its accumulation dtype (float32 or float64), and cluster ids
(B, L), where the id C means "in no cluster" (padding, first layer). Sums over tokens are GEMMs with
a one-hot matrix: no atomics, so equal inputs give equal bits.

B independent sets of tokens, L tokens in each, D features, C clusters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MEASURES = ("mad", "variance", "std", "gini", "iqr")


class Clusters(NamedTuple):
    """The cluster of each token, and what every measure computes from it."""

    id: Tensor  # (B, L) C for a token in no cluster
    one_hot: Tensor  # (B, C, L) a token in no cluster has a column of zeros
    tokens: Tensor  # (B, C, 1) number of tokens of each cluster, in the dtype of the one-hot matrix

    @classmethod
    def of(cls, id_BL: Tensor, num_clusters: int, dtype: torch.dtype) -> "Clusters":
        """Return the clusters with these ids."""
        ids_C1 = torch.arange(num_clusters, device=id_BL.device)[:, None]
        one_hot_BCL = (id_BL[:, None] == ids_C1).to(dtype)
        return cls(id_BL, one_hot_BCL, one_hot_BCL.sum(-1, keepdim=True))

    def sorted(self) -> "Clusters":
        """Return the clusters of tokens that are sorted by cluster."""
        _, C, _ = self.one_hot.shape
        return Clusters.of(self.id.sort(dim=1).values, C, self.one_hot.dtype)


def mean_per_cluster(value_BLD: Tensor, clusters: Clusters) -> Tensor:
    """Return the (B, C, D) mean of each cluster; 0 for an empty cluster."""
    return torch.bmm(clusters.one_hot, value_BLD) / clusters.tokens.clamp(min=1)


def rows_of(value_BXD: Tensor, index_BY: Tensor) -> Tensor:
    """Return (B, Y, D): of every set b the rows value[b, index[b]]."""
    B, X, D = value_BXD.shape
    if B > 1:
        index_BY = index_BY + X * torch.arange(B, device=index_BY.device)[:, None]
    rows_ND = value_BXD.reshape(B * X, D).index_select(0, index_BY.reshape(-1))
    return rows_ND.view(*index_BY.shape, D)


def deviation(x_BLD: Tensor, clusters: Clusters) -> Tensor:
    """Return (B, L, D): each token minus the mean of its cluster.

    The mean is computed relative to one token of the cluster, the anchor: where all tokens are
    equal every deviation is exactly 0, and a large common offset costs no precision. Shifting all
    tokens does not change a deviation, so the anchor needs no gradient.
    """
    # A token in no cluster reads the last cluster, but has weight 0 in the one-hot matrix.
    own_BL = clusters.id.clamp(max=clusters.one_hot.shape[1] - 1)
    first_BC = clusters.one_hot.max(-1).indices
    anchor_BCD = rows_of(x_BLD.detach(), first_BC)
    shifted_BLD = x_BLD - rows_of(anchor_BCD, own_BL)
    return shifted_BLD - rows_of(mean_per_cluster(shifted_BLD, clusters), own_BL)


def mad(x_BLD: Tensor, clusters: Clusters) -> Tensor:
    """Mean absolute deviation from the cluster's mean (Definition 1)."""
    return mean_per_cluster(deviation(x_BLD, clusters).abs(), clusters)


def variance(x_BLD: Tensor, clusters: Clusters) -> Tensor:
    """Population variance in two passes: a difference of large squares would cancel."""
    return mean_per_cluster(deviation(x_BLD, clusters).square(), clusters)


def std(x_BLD: Tensor, clusters: Clusters) -> Tensor:
    """Standard deviation, with gradient 0 for a constant feature."""
    variance_BCD = variance(x_BLD, clusters)
    # The square root has no derivative at 0: a constant feature gets gradient 0, not inf * 0.
    constant = variance_BCD == 0
    return torch.where(constant, 1.0, variance_BCD).sqrt().masked_fill(constant, 0.0)


def sort_within_clusters(x_BLD: Tensor, clusters: Clusters) -> tuple[Tensor, Clusters]:
    """Sort each feature by (cluster, value); return values (B, L, D) and the sorted clusters."""
    by_value_BLD = x_BLD.detach().argsort(dim=1)
    cluster_BLD = clusters.id[..., None].expand_as(x_BLD).gather(1, by_value_BLD)
    by_cluster_BLD = cluster_BLD.argsort(dim=1, stable=True)
    permutation_BLD = by_value_BLD.gather(1, by_cluster_BLD)
    return x_BLD.gather(1, permutation_BLD), clusters.sorted()


def gini(x_BLD: Tensor, clusters: Clusters) -> Tensor:
    """Mean |x_i - x_j| over all ordered pairs of a cluster: s of Theorem 1, in O(n log n).

    Sort a cluster's n values. A gap between two neighbours with r values below and n-r above is
    inside r(n-r) pairs, so the mean is a weighted sum of gaps: never negative, and 0 for equal
    values.
    """
    sorted_BLD, clusters = sort_within_clusters(x_BLD, clusters)
    _, one_hot_BCL, count_BC1 = clusters
    first_BC1 = count_BC1.cumsum(1) - count_BC1
    position_L = torch.arange(x_BLD.shape[1], device=x_BLD.device, dtype=x_BLD.dtype)
    below_BL = position_L - (one_hot_BCL * first_BC1).sum(1)
    size_BL = (one_hot_BCL * count_BC1).sum(1)
    share_BL1 = (below_BL / size_BL.clamp(min=1))[..., None]
    gap_BLD = torch.diff(sorted_BLD, dim=1, prepend=sorted_BLD[:, :1])
    # The first value of a cluster has share 0, so the gap to the previous cluster has weight 0.
    return 2 * (one_hot_BCL @ (share_BL1 * (1 - share_BL1) * gap_BLD))


def iqr(x_BLD: Tensor, clusters: Clusters) -> Tensor:
    """Interquartile range; quantiles are interpolated linearly between order statistics.

    The differences of values are added up: a quantile would be rounded as the values are, which is
    much where they lie far from zero and close together.
    """
    sorted_BLD, _ = sort_within_clusters(x_BLD, clusters)
    count_BC = clusters.tokens[..., 0]
    first_BC = count_BC.cumsum(1) - count_BC
    span_BC = (count_BC - 1).clamp(min=0)

    def value(rank_BC: Tensor) -> Tensor:
        index_BC = (first_BC + rank_BC).clamp(max=x_BLD.shape[1] - 1).long()
        return sorted_BLD.gather(1, index_BC[..., None].expand(-1, -1, x_BLD.shape[2]))

    def quantile(share: float) -> tuple[Tensor, Tensor]:
        """Return the value below the quantile, and the distance from it to the quantile."""
        position_BC = share * span_BC
        rank_BC = position_BC.floor()
        low_BCD, high_BCD = value(rank_BC), value(torch.minimum(rank_BC + 1, span_BC))
        return low_BCD, (position_BC - rank_BC)[..., None] * (high_BCD - low_BCD)

    (low_BCD, above_low_BCD), (high_BCD, above_high_BCD) = quantile(0.25), quantile(0.75)
    range_BCD = (high_BCD - low_BCD) + (above_high_BCD - above_low_BCD)
    return range_BCD.masked_fill((count_BC == 0)[..., None], 0.0)
