"""How hard a router's problem is: the condition number of its input's second moment.

N tokens, D features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Eigenvalues below this share of the largest are rounding: tokens are float32, so a direction they
# leave empty, such as LayerNorm's mean, still has about (1e-7)^2 of it.
ROUNDING = 1e-12


class Conditioning(NamedTuple):
    """The Hessian of a least-squares router is this moment (Proposition 2)."""

    number: float  # largest eigenvalue over the smallest that is not rounding; 1 is best
    rank: int  # eigenvalues that are not rounding; below D: the number is of that subspace


def condition_number(x_ND: Tensor) -> Conditioning:
    """Of E[x x^T], not centred: that is what a router without a bias sees."""
    x_ND = x_ND.double()
    eigenvalues_D = torch.linalg.eigvalsh(x_ND.T @ x_ND / len(x_ND))
    real = eigenvalues_D[eigenvalues_D > ROUNDING * eigenvalues_D[-1]]
    if len(real) == 0:
        return Conditioning(1.0, 0)  # all tokens are 0
    return Conditioning(float(real[-1] / real[0]), len(real))
