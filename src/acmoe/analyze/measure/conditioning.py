"""Measure how hard a router is to train: the condition number of its input's covariance.

N tokens, D features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# A direction counts as present if its variance exceeds this share of the largest. Rounding fills an
# absent direction, such as the one that a LayerNorm removes, with about 1e-14 of the largest
# variance. (Tokens of a model in bfloat16 would need 1e-5; under autocast a LayerNorm returns
# float32.)
TOLERANCE = 1e-10


class Conditioning(NamedTuple):
    """Condition of the covariance of a router's input, in the directions that are present.

    With the mean taken into a bias, the covariance is the Hessian of a least-squares router
    (Proposition 2).
    """

    number: float  # largest variance over the smallest of a present direction; 1 is best
    rank: int  # present directions; if below D, `number` is of their subspace


def condition_number(x_ND: Tensor) -> Conditioning:
    """Return the condition number of the covariance of x, and its rank.

    The mean is subtracted: the bias of a LayerNorm shifts all tokens by one vector, and without
    this step its small part along a direction without variance would pass for a variance.
    """
    x_ND = x_ND.double()
    x_ND = x_ND - x_ND.mean(0)
    # The Gram matrix of fewer tokens than features has the same eigenvalues that are not zero.
    product = x_ND.T @ x_ND if len(x_ND) >= x_ND.shape[1] else x_ND @ x_ND.T
    eigenvalues = torch.linalg.eigvalsh(product / len(x_ND))
    present = eigenvalues[eigenvalues > TOLERANCE * eigenvalues[-1]]
    if len(present) == 0:
        return Conditioning(1.0, 0)  # all tokens are equal
    return Conditioning(float(present[-1] / present[0]), len(present))
