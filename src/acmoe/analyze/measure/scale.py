"""Measure the scale M: its distance from the identity, and how its variance is composed.

C clusters, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acmoe.errors import check

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
LEAST = 1e-6  # logarithms clamp M at this value, since a random M may hold zeros


@dataclass(frozen=True, kw_only=True)
class ScaleSpread:
    """Statistics of M's diagonals over the clusters that have tokens. Logarithms are natural.

    The shares come from the two-way decomposition log M[c, d] = mean + cluster effect c +
    feature effect d + interaction. They are fractions of the variance of log M and add up to one.
    """

    rms_log: float  # distance from the identity; at 0.1 features are stretched by about 10%
    std_log: float
    feature_share: float  # feature effect: one factor per feature, equal in all clusters
    cluster_share: float  # cluster effect: one factor per cluster, equal for all features
    own_share: float  # interaction: each cluster's own weighting, which clustering adds
    quantiles: tuple[float, ...]  # quantiles of M at QUANTILES
    effective_features: float  # mean over clusters of (sum w)^2 / sum w^2; D if M is constant
    stretched: tuple[tuple[int, float], ...]  # features with the largest geometric mean of M


def measure_scale(scale_CD: Tensor, *, top: int = 5) -> ScaleSpread:
    """Measure the rows of `scale_CD`. The caller leaves out clusters without a token."""
    check(len(scale_CD) > 0, "no cluster has a token; there is no scale to measure")
    scale_CD = scale_CD.double()
    log_CD = scale_CD.clamp(min=LEAST).log()
    feature_share, cluster_share, own_share = two_way(log_CD)
    effective_C = scale_CD.sum(-1).square() / scale_CD.square().sum(-1)
    mean_D = log_CD.mean(0)
    best = mean_D.argsort(descending=True, stable=True)[:top]
    points = torch.tensor(QUANTILES, dtype=torch.float64)
    return ScaleSpread(
        rms_log=float(log_CD.square().mean().sqrt()),
        std_log=float(log_CD.std(correction=0)),
        feature_share=feature_share,
        cluster_share=cluster_share,
        own_share=own_share,
        quantiles=tuple(scale_CD.flatten().quantile(points).tolist()),
        effective_features=float(effective_C.mean()),
        stretched=tuple((int(d), float(mean_D[d].exp())) for d in best),
    )


def two_way(value_CD: Tensor) -> tuple[float, float, float]:
    """Return the shares of the variance due to columns, rows and their interaction.

    All three are zero if the values are constant.
    """
    value_CD = value_CD - value_CD.mean()
    total = value_CD.square().mean()
    if total <= 1e-24:  # rounding errors of equal values
        return 0.0, 0.0, 0.0
    column_D, row_C1 = value_CD.mean(0), value_CD.mean(1, keepdim=True)
    rest_CD = value_CD - column_D - row_C1
    parts = (column_D.square().mean(), row_C1.square().mean(), rest_CD.square().mean())
    columns, rows, rest = (float(part / total) for part in parts)
    return columns, rows, rest


def log_distance(first_CD: Tensor, second_CD: Tensor) -> float:
    """Return the root mean square difference of log M; 0 if the scales are equal."""
    logs = [scale.double().clamp(min=LEAST).log() for scale in (first_CD, second_CD)]
    return float((logs[0] - logs[1]).square().mean().sqrt())


def cluster_scales(scale_ND: Tensor, cluster_N: Tensor, num_clusters: int) -> tuple[Tensor, bool]:
    """Average the scale over each cluster's tokens, (C, D); also return whether it varies there.

    The mean is taken in float64, where the mean of equal float32 numbers is exactly that number. A
    cluster without a token gets ones.
    """
    has_cluster_N = cluster_N >= 0
    scale_ND, cluster_N = scale_ND[has_cluster_N], cluster_N[has_cluster_N]
    count_C1 = cluster_N.bincount(minlength=num_clusters)[:, None]
    total_CD = torch.zeros(num_clusters, scale_ND.shape[1], dtype=torch.float64)
    total_CD = total_CD.index_add(0, cluster_N, scale_ND.double())
    scale_CD = torch.where(count_C1 > 0, total_CD / count_C1.clamp(min=1), 1.0).float()
    return scale_CD, not torch.equal(scale_CD[cluster_N], scale_ND)
