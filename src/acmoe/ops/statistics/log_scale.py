"""Split log M into a part common to all clusters and a part of each cluster's own.

log M_k = common + own_k. The common part rescales every token alike, which equals rescaling the
expert embeddings: it is a preconditioner, and no more (Proposition 2). Only the own parts can send
the tokens of two clusters to different experts.

C clusters, D features, X any leading dimensions (none, or one set of clusters per sequence).
"""

import torch
from torch import Tensor


def split_log_scale(scale: Tensor, occupied: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of log M over clusters (X, D), and each cluster's difference from it.

    scale      (X, C, D) positive diagonals of M
    occupied   (X, C) True for clusters whose scale comes from their tokens. The others have a scale
               of ones, are left out of the mean, and have a difference of zero.
    The second result is (X, C, D).

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
