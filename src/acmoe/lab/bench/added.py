"""What one contestant takes more than another, of the same rounds."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_OUTSIDE = 0.025  # chance that the median lies below the interval, and the same above


class Added(NamedTuple):
    """The median difference of a round and its 95% interval, in ms and in percent of the base."""

    ms: float
    percent: float
    low_percent: float | None  # None: too few rounds for an interval
    high_percent: float | None


def added(samples: Sequence[float], base: Sequence[float]) -> Added:
    """samples - base, round by round: what slows a whole round down cancels out."""
    differences = sorted(one - other for one, other in zip(samples, base, strict=True))
    share = 100 / statistics.median(base)
    middle = statistics.median(differences)
    left_out = _left_out(len(differences))
    if left_out is None:
        return Added(middle, middle * share, None, None)
    low, high = differences[left_out], differences[-1 - left_out]
    return Added(middle, middle * share, low * share, high * share)


def _left_out(rounds: int) -> int | None:
    """How many of the smallest, and of the largest, differences lie outside the interval.

    A difference lies below the true median with chance 1/2, whatever the distribution. None where
    even the smallest one lies above it too often, which needs 6 rounds not to be.
    """
    below, chance = 0, 0.5**rounds
    while chance <= _OUTSIDE:
        below += 1
        chance += math.comb(rounds, below) * 0.5**rounds
    return below - 1 if below else None
