"""Exact probabilities of linear rules on Gaussian tokens, by closed forms and quadrature.

D features.
"""

import math

import torch
from torch import Tensor

from acmoe.errors import check


def upper_tail(z: Tensor) -> Tensor:
    """Return P(Z > z) of a standard normal."""
    probability: Tensor = torch.special.ndtr(-z)
    return probability


def rule_z(mean_D: Tensor, covariance_DD: Tensor, normal_D: Tensor, offset: Tensor) -> Tensor:
    """Return z with P(normal . h + offset < 0) = P(Z > z), for h of this mean and covariance."""
    deviation = (normal_D @ covariance_DD @ normal_D).sqrt()
    return (normal_D @ mean_D + offset) / deviation


def simpson(values: Tensor, step: float) -> Tensor:
    """Integrate equally spaced values along the last axis; their number is odd."""
    check(
        values.shape[-1] % 2 == 1, f"{values.shape[-1]} values; Simpson's rule needs an odd number"
    )
    inner = 4 * values[..., 1:-1:2].sum(-1) + 2 * values[..., 2:-1:2].sum(-1)
    return (values[..., 0] + inner + values[..., -1]) * (step / 3)


def both_above(a: float, b: float, correlation: float, points: int = 8001) -> float:
    """Return P(X > a, Y > b) of two standard normals with this correlation, |correlation| < 1.

    Its derivative by the correlation r is the density at (a, b) (Plackett). With r = sin t the
    integral from independence to r is smooth up to r = +-1:

        P = P(X > a) P(Y > b) + int_0^asin(r) exp(-q(t)) dt / (2 pi),
        q(t) = (a^2 + b^2 - 2 a b sin t) / (2 cos^2 t)
    """
    end = math.asin(correlation)
    t = torch.linspace(0, end, points, dtype=torch.float64)
    exponent = -(a * a + b * b - 2 * a * b * t.sin()) / (2 * t.cos().square())
    apart = upper_tail(torch.tensor([a, b], dtype=torch.float64)).prod()
    return (apart + simpson(exponent.exp(), end / (points - 1)) / (2 * math.pi)).item()


def agreement(
    mean_D: Tensor,
    covariance_DD: Tensor,
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
) -> tuple[float, float]:
    """Return P(both rules are positive) and P(both are negative).

    A rule is (normal, offset) and has the value normal . h + offset.
    """
    u_D, v_D = first[0], second[0]
    z, y = (rule_z(mean_D, covariance_DD, *rule).item() for rule in (first, second))
    cross = u_D @ covariance_DD @ v_D
    size = ((u_D @ covariance_DD @ u_D) * (v_D @ covariance_DD @ v_D)).sqrt()
    correlation = (cross / size).item()
    return both_above(-z, -y, correlation), both_above(z, y, correlation)
