"""Confidence intervals for error rates counted by Monte Carlo."""

import math

import torch
from torch import Tensor

# Chance that a correct formula is called wrong anywhere within one check.
FAMILY_LEVEL = 1e-5


def family_z(count: int, level: float = FAMILY_LEVEL) -> float:
    """Normal quantile at which `count` two-sided intervals all cover, but for chance `level`."""
    tail = torch.tensor(level / (2 * count), dtype=torch.float64)
    return -float(torch.special.ndtri(tail))


def wilson(errors: int, trials: int, z: float) -> tuple[float, float]:
    """Wilson score interval of a binomial rate: never leaves [0, 1], exact width at 0 errors."""
    rate = errors / trials
    widen = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / widen
    half = z / widen * math.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_z(first_wrong_T: Tensor, second_wrong_T: Tensor) -> float:
    """McNemar's statistic on the same tokens: above zero, the first errs more often."""
    only_first = int((first_wrong_T & ~second_wrong_T).sum())
    only_second = int((second_wrong_T & ~first_wrong_T).sum())
    return (only_first - only_second) / math.sqrt(max(1, only_first + only_second))
