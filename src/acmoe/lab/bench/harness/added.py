"""Measure the extra time of one function over another, timed in the same rounds."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_OUTSIDE = 0.025  # probability that the median lies below the interval; the same above it


class Added(NamedTuple):
    """The median difference per round, and its 95% interval in percent of the base."""

    ms: float
    percent: float
    low_percent: float | None  # None if there are too few rounds for an interval
    high_percent: float | None


def added(samples: Sequence[float], base: Sequence[float]) -> Added:
    """Subtract `base` from `samples` round by round, so that a slow round affects both alike."""
    differences = sorted(one - other for one, other in zip(samples, base, strict=True))
    share = 100 / statistics.median(base)
    middle = statistics.median(differences)
    left_out = _left_out(len(differences))
    if left_out is None:
        return Added(middle, middle * share, None, None)
    low, high = differences[left_out], differences[-1 - left_out]
    return Added(middle, middle * share, low * share, high * share)


def _left_out(rounds: int) -> int | None:
    """Return how many of the smallest (and of the largest) differences lie outside the interval.

    For any distribution, a difference lies below the true median with probability 1/2. Return None
    if even the smallest difference lies above the median too often, as with fewer than 6 rounds.
    """
    below, chance = 0, 0.5**rounds
    while chance <= _OUTSIDE:
        below += 1
        chance += math.comb(rounds, below) * 0.5**rounds
    return below - 1 if below else None
