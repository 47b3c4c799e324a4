"""Measure how hard a router is to train: the condition number of its input's second moment.

N tokens, D features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Eigenvalues below this share of the largest count as rounding errors. Tokens are float32, so even
# a direction without variance, such as the mean that LayerNorm removes, has about (1e-7)^2 of it.
ROUNDING = 1e-12


class Conditioning(NamedTuple):
    """Condition of E[x x^T], the Hessian of a least-squares router (Proposition 2)."""

    number: float  # largest eigenvalue over the smallest above rounding; 1 is best
    rank: int  # eigenvalues above rounding; if below D, `number` is of that subspace


def condition_number(x_ND: Tensor) -> Conditioning:
    """Return the condition number of E[x x^T], not centred: the router has no bias."""
    x_ND = x_ND.double()
    eigenvalues_D = torch.linalg.eigvalsh(x_ND.T @ x_ND / len(x_ND))
    real = eigenvalues_D[eigenvalues_D > ROUNDING * eigenvalues_D[-1]]
    if len(real) == 0:
        return Conditioning(1.0, 0)  # all tokens are 0
    return Conditioning(float(real[-1] / real[0]), len(real))
