"""Exact rates of Eqn. 8 where each embedding is nonzero on a block of features of its own only.

Let a_k = h' e_k be the plain affinity of expert k, and let M_j have a constant value m_jk on the
block of k. Then h' M_j e_k = m_jk a_k, so a token with the plain choice j goes to the largest of
m_jk a_k. For embeddings equal to means of length u, a_k / u of a token of cluster t is normal with
the mean u (k = t) or 0 and the deviation of cluster t on block k, independent over k.

T the true cluster, J the plain choice, K an expert; all run over the C clusters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.lab.theory.gaussians import simpson

POINTS, RAY_POINTS = 1601, 401


class BlockRates(NamedTuple):
    """Shares of all tokens, and of wrong and right plain choices."""

    plain_wrong: float
    adaptive_wrong: float  # NaN if not asked for
    repeated_wrong: float
    repeated_right: float
    left: float  # all tokens that leave their plain choice
    negative: float  # all tokens whose affinities are all negative


def block_rates(
    length: float, std_CC: Tensor, scale_CC: Tensor, *, mended: bool = True
) -> BlockRates:
    """Return the rates for deviations std[t, k] and scales m[j, k] of block k, by quadrature.

    The error in M takes integrals over two affinities; without `mended` it is NaN.
    """
    count = len(std_CC)
    x = torch.linspace(-9, length + 9, POINTS, dtype=torch.float64)
    step = (length + 18) / (POINTS - 1)
    right = wrong = plain_right = moved = negative = 0.0
    for t in range(count):
        mean_C = length * (torch.arange(count) == t).double()
        grid = _Grid(x, step, mean_C, std_CC[t])
        negative += torch.special.ndtr(-mean_C / std_CC[t]).prod().item()
        for j in range(count):
            again = grid.stays(j, scale_CC[j])
            if j == t:
                right += again
                plain_right += grid.stays(j, torch.ones_like(mean_C))
            else:
                wrong += again
                moved += grid.moves(j, t, scale_CC[j]) if mended else float("nan")
    plain_wrong = 1 - plain_right / count
    return BlockRates(
        plain_wrong=plain_wrong,
        adaptive_wrong=1 - (right + moved) / count,
        repeated_wrong=min(1.0, wrong / count / plain_wrong),  # above one by rounding only
        repeated_right=min(1.0, right / plain_right),
        left=1 - (right + wrong) / count,
        negative=negative / count,
    )


class _Grid:
    """Densities and distribution functions of the affinities of one true cluster."""

    def __init__(self, x: Tensor, step: float, mean_C: Tensor, std_C: Tensor) -> None:
        self.x, self.step, self.mean, self.std = x, step, mean_C, std_C

    def density(self, k: int, at: Tensor) -> Tensor:
        z = (at - self.mean[k]) / self.std[k]
        density: Tensor = torch.exp(-z.square() / 2) / (self.std[k] * (2 * torch.pi) ** 0.5)
        return density

    def below(self, k: int, bound: Tensor) -> Tensor:
        probability: Tensor = torch.special.ndtr((bound - self.mean[k]) / self.std[k])
        return probability

    def stays(self, j: int, scale_C: Tensor) -> float:
        """Return P(j is the plain choice, and again the choice in M_j)."""
        others = torch.ones_like(self.x)
        for k in range(len(self.mean)):
            if k != j:
                bound = torch.minimum(self.x, scale_C[j] / scale_C[k] * self.x)
                others = others * self.below(k, bound)
        return simpson(self.density(j, self.x) * others, self.step).item()

    def moves(self, j: int, to: int, scale_C: Tensor) -> float:
        """Return P(j is the plain choice, and `to` the choice in M_j); j != to.

        With y the affinity of `to` and w y that of j this means y <= w y and w y <= factor y, with
        factor = m_to / m_j: w lies between 1 and the factor, y > 0 if the factor is above one.
        """
        factor = (scale_C[to] / scale_C[j]).item()
        end = self.x[-1].item() if factor > 1 else self.x[0].item()
        y = torch.linspace(0, end, RAY_POINTS, dtype=torch.float64)[:, None]
        w = torch.linspace(1, factor, RAY_POINTS, dtype=torch.float64)
        inside = self.density(to, y) * self.density(j, w * y) * y.abs()
        for k in range(len(self.mean)):
            if k not in (j, to):
                inside = inside * self.below(k, torch.minimum(w * y, scale_C[to] / scale_C[k] * y))
        inner = simpson(inside, abs(factor - 1) / (RAY_POINTS - 1))
        return simpson(inner, abs(end) / (RAY_POINTS - 1)).item()
