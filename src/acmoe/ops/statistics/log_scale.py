"""The scale in logarithms: what all clusters share, and what each has of its own.

log M_k = common + own_k. The common part stretches every token alike, which is the same as
stretching the expert embeddings: a preconditioner, and no more (Proposition 2). Only the own parts
can send two clusters' tokens to different experts.

C clusters, D features, X any leading dimensions (none, or one set of clusters per sequence).
"""

import torch
from torch import Tensor

from acmoe.ops.statistics.scale import mean_one


def split_log_scale(scale: Tensor, occupied: Tensor) -> tuple[Tensor, Tensor]:
    """log M as a mean over the clusters (X, D) and each one's departure from it (X, C, D).

    scale      (X, C, D) positive diagonals of M
    occupied   (X, C) True for clusters whose scale comes from their tokens. The others, whose scale
               of one says nothing, do not count in the mean and depart from it by zero.

    >>> common, own = split_log_scale(torch.tensor([[1.0, 4.0], [4.0, 1.0]]), torch.ones(2) > 0)
    >>> common.exp(), own.exp()  # geometric means 2 and 2; 1/2 and 4/2, 4/2 and 1/2
    (tensor([2., 2.]), tensor([[0.5000, 2.0000],
            [2.0000, 0.5000]]))
    """
    occupied_XC1 = occupied[..., None]
    log_XCD = torch.where(occupied_XC1, scale, 1.0).log()
    number_X1 = occupied.sum(-1, keepdim=True).clamp(min=1)
    common_XD = log_XCD.sum(-2) / number_X1
    return common_XD, torch.where(occupied_XC1, log_XCD - common_XD[..., None, :], 0.0)


def reshape_scale(
    scale: Tensor,
    occupied: Tensor,
    *,
    power: float = 1.0,
    part: str = "both",
    normalize: str = "cluster",
) -> Tensor:
    """M^power, or one part of it, mean one again; the scale itself with the defaults.

    Factors that a normalisation shares out cancel in it, so M^p is s^-p normalised, and the product
    of the two parts of M is M up to such factors. Without own parts no cluster differs from
    another, so "common" gives the scale of the others to clusters that are not occupied, too;
    everywhere else those keep one.
    """
    if power == 1 and part == "both":
        return scale
    occupied_XC1 = occupied[..., None]
    # float64: the rounding of two logarithms is then far below that of the float32 result.
    scale_XCD = scale.double()
    if part == "both":
        log_XCD = scale_XCD.log()
    else:
        common_XD, log_XCD = split_log_scale(scale_XCD, occupied)
        if part == "common":
            log_XCD = common_XD[..., None, :].expand_as(scale_XCD)
            occupied_XC1 = torch.ones_like(occupied_XC1)
    return mean_one((power * log_XCD).exp(), occupied_XC1, normalize).to(scale.dtype)
