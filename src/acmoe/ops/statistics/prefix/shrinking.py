"""The scale of each token under causal statistics: 1/s of its cluster's prefix.

Few tokens say little about a cluster, so the dispersion of a prefix (reference.py) is shrunk
towards a running average before the scale is computed from it.

B sequences, L tokens in each, D features, C clusters, J clusters read by each token.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Prior(NamedTuple):
    """The running average of each cluster, which counts as `tokens` tokens of every prefix."""

    dispersion: Tensor  # (C, D)
    weight: Tensor  # (C,) tokens in the average; it is read from `min_tokens` of the scale on
    tokens: float


def shrunk(
    spread_BLJD: Tensor, count_BLJ: Tensor, assignment_BLJ: Tensor, prior: Prior, min_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return (n * prefix + k * average) / (n + k) with k = `prior.tokens`, and n + k.

    The prefix of fewer than two tokens and the average of fewer than min_tokens do not count.
    """
    own_BLJ = assignment_BLJ.clamp(min=0)
    known_BLJ = (prior.weight[own_BLJ] >= min_tokens) & (assignment_BLJ >= 0)
    prior_BLJ = (prior.tokens * known_BLJ).to(spread_BLJD.dtype)
    # A single token has dispersion 0, which carries no information.
    seen_BLJ = torch.where(count_BLJ >= 2, count_BLJ, 0.0)
    total_BLJ = seen_BLJ + prior_BLJ
    prior_BLJD = prior.dispersion.to(spread_BLJD.dtype)[own_BLJ]
    mixed_BLJD = seen_BLJ[..., None] * spread_BLJD + prior_BLJ[..., None] * prior_BLJD
    return mixed_BLJD / total_BLJ.clamp(min=1)[..., None], total_BLJ
