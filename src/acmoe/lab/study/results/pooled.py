"""Paired differences of several settings with one pooled standard deviation.

With three pairs a standard deviation is nearly unknown: by luck it may be a tenth of the true one,
and the interval looks certain. Settings of one study that measure the same thing share their
spread instead: s^2 = sum (n_i - 1) s_i^2 / sum (n_i - 1), with sum (n_i - 1) degrees of freedom.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple, TypeVar

from acmoe.evaluate.student import critical_value
from acmoe.lab.study.results.statistics import CONFIDENCE, all_equal

POWER = 0.8  # probability to find an effect of the size called detectable
Key = TypeVar("Key")


class PooledDifference(NamedTuple):
    """The mean difference of one setting, with an interval from the pooled spread."""

    n: int
    mean: float
    low: float | None  # None: no setting has two pairs that differ: no spread is known
    high: float | None
    # The least true difference that a 5 % test of this many pairs finds in 80 % of all cases.
    detectable: float | None


def pooled_differences(
    differences: Mapping[Key, Sequence[float]],
) -> dict[Key, PooledDifference]:
    """Return an interval for every setting that has a pair; the keys name the settings."""
    known = {key: values for key, values in differences.items() if values}
    freedom = sum(len(values) - 1 for values in known.values())
    if all(map(all_equal, known.values())):  # always so where each has a single pair
        return {
            key: PooledDifference(len(values), fmean(values), None, None, None)
            for key, values in known.items()
        }
    squares = math.fsum(
        (len(values) - 1) * variance(values) for values in known.values() if len(values) > 1
    )
    std = math.sqrt(squares / freedom)
    reach = critical_value(CONFIDENCE, freedom)
    # P(|T| < t) = 0.6 has P(T < t) = 0.8.
    found = reach + critical_value(2 * POWER - 1, freedom)
    result = {}
    for key, values in known.items():
        error = std / math.sqrt(len(values))
        mean = fmean(values)
        result[key] = PooledDifference(
            len(values), mean, mean - reach * error, mean + reach * error, found * error
        )
    return result
