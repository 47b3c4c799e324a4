"""Confidence intervals for error rates that are counted by Monte Carlo."""

import math

import torch
from torch import Tensor

# Probability that one check rejects a correct formula, over all of its intervals.
FAMILY_LEVEL = 1e-5


def family_z(count: int, level: float = FAMILY_LEVEL) -> float:
    """Return the normal quantile for `count` two-sided intervals with family error `level`."""
    tail = torch.tensor(level / (2 * count), dtype=torch.float64)
    return -float(torch.special.ndtri(tail))


def wilson(errors: int, trials: int, z: float) -> tuple[float, float]:
    """Return the Wilson score interval of a binomial rate.

    It stays within [0, 1] and has the right width even at 0 errors.
    """
    rate = errors / trials
    widen = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / widen
    half = z / widen * math.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def agrees(errors: int, trials: int, expected: float, z: float, *, slack: float = 0.0) -> bool:
    """Return whether the interval of a counted rate, widened by `slack`, holds the expected one."""
    low, high = wilson(errors, trials, z)
    return low - slack <= expected <= high + slack


def paired_z(first_wrong_T: Tensor, second_wrong_T: Tensor) -> float:
    """Return McNemar's z for two rules on the same tokens; positive if the first errs more."""
    only_first = int((first_wrong_T & ~second_wrong_T).sum())
    only_second = int((second_wrong_T & ~first_wrong_T).sum())
    return (only_first - only_second) / math.sqrt(max(1, only_first + only_second))
