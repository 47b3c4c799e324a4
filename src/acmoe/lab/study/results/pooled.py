"""Paired differences of several settings with one pooled standard deviation.

With three pairs a standard deviation is nearly unknown: by luck it may be a tenth of the true one,
and the interval looks certain. Settings of one study that measure the same thing share their
spread instead: s^2 = sum (n_i - 1) s_i^2 / sum (n_i - 1), with sum (n_i - 1) degrees of freedom.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from statistics import fmean, variance
from typing import NamedTuple, TypeVar

import numpy as np

from acmoe.evaluate.seeds import CONFIDENCE, FEWEST_PAIRS, all_equal
from acmoe.evaluate.student import critical_value

POWER = 0.8  # probability to find an effect of the size called detectable
_NODES = 200  # nodes of the Gauss-Legendre quadrature over the standard deviation's distribution
Key = TypeVar("Key")


class PooledDifference(NamedTuple):
    """The mean difference of one setting, with an interval from the pooled spread."""

    n: int
    mean: float
    low: float | None  # None: fewer than two degrees of freedom, or equal pairs: no spread is known
    high: float | None
    # The least true difference that a 5 % test of this many pairs finds in 80 % of all cases.
    detectable: float | None


def pooled_differences(
    differences: Mapping[Key, Sequence[float]], spread_of: Collection[Key] | None = None
) -> dict[Key, PooledDifference]:
    """Return an interval for every setting that has a pair; the keys name the settings.

    The spread is that of the settings in `spread_of`; None: of all.
    """
    known = {key: values for key, values in differences.items() if values}
    pool = [values for key, values in known.items() if spread_of is None or key in spread_of]
    freedom = sum(len(values) - 1 for values in pool)
    if freedom < FEWEST_PAIRS - 1 or all(map(all_equal, pool)):
        return {
            key: PooledDifference(len(values), fmean(values), None, None, None)
            for key, values in known.items()
        }
    squares = math.fsum((len(values) - 1) * variance(values) for values in pool if len(values) > 1)
    std = math.sqrt(squares / freedom)
    reach = critical_value(CONFIDENCE, freedom)
    result = {}
    for key, values in known.items():
        error = std / math.sqrt(len(values))
        mean = fmean(values)
        seen = detectable_errors(freedom) * error
        result[key] = PooledDifference(
            len(values), mean, mean - reach * error, mean + reach * error, seen
        )
    return result


@cache
def detectable_errors(freedom: int) -> float:
    """Return the least detectable difference as a multiple of the mean's standard error.

    A true difference of d errors makes t noncentral: t = (Z + d) / W, with W^2 a chi-squared number
    over its degrees of freedom, so P(t > c) = E[Phi(d - c W)]. The d of probability 0.8 is
    returned.
    """
    critical = critical_value(CONFIDENCE, freedom)
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    end = math.sqrt(freedom) + 9  # a chi number has a standard deviation below 1
    chi = (nodes + 1) * end / 2
    log_density = (freedom - 1) * np.log(chi) - chi**2 / 2
    log_density -= (freedom / 2 - 1) * math.log(2) + math.lgamma(freedom / 2)
    share = weights * np.exp(log_density) * end / 2
    limits = critical * chi / math.sqrt(freedom)
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        found = [math.erfc((limit - middle) / math.sqrt(2)) / 2 for limit in limits]
        low, high = (middle, high) if float(share @ found) < POWER else (low, middle)
    return (low + high) / 2
