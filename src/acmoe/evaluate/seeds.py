"""Statistics over seeds: means, standard deviations, paired differences and their tests.

Two tests of "no difference" are given: the paired t test, which assumes a normal distribution, and
the sign-flip permutation test, which assumes only symmetry; its p is never below 2 / 2^n.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np

from acmoe.errors import check
from acmoe.evaluate.student import critical_value, two_sided_p

CONFIDENCE = 0.95
FEWEST_PAIRS = 3  # for an interval and a t test: two pairs that agree by chance would look certain
ROUNDING = 1e-9  # differences are equal if they differ by this share of the largest
EXACT_PAIRS = 16  # with more pairs, a random sample of sign patterns replaces all 2^n
DRAWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and standard deviation of a metric over seeds."""

    n: int
    mean: float
    std: float | None  # sample standard deviation; None for a single seed

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return mean and standard deviation of one or more values, one for each seed."""
        check(len(values) > 0, "no figure to take the mean of; train a run, or run the study first")
        return cls(
            n=len(values), mean=fmean(values), std=stdev(values) if len(values) > 1 else None
        )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two conditions, paired by seed."""

    n: int
    mean: float
    std: float | None
    low: float | None  # lower end of the 95 % interval for the mean difference
    high: float | None
    p_t: float | None  # paired t test, two-sided
    p_flip: float  # sign-flip permutation test, two-sided


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float]
) -> Difference | None:
    """Compare over the seeds that both conditions have; None where there are none.

    Interval and t test are None where the spread is not known: with fewer than three pairs, or
    where all differences are equal, which happens with accuracies over few images.
    """
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds:
        return None
    pairs = {seed: (float(values[seed]), float(baseline[seed])) for seed in seeds}
    for seed, both in pairs.items():
        check(
            all(map(math.isfinite, both)),
            f"seed {seed} has the figures {both[0]} and {both[1]}, and a mean needs finite ones; "
            "leave the seed out of both conditions, and say that its run diverged",
        )
    differences = [value - before for value, before in pairs.values()]
    spread = Spread.of(differences)
    found = Difference(
        n=spread.n,
        mean=spread.mean,
        std=spread.std,
        low=None,
        high=None,
        p_t=None,
        p_flip=sign_flip_p(differences),
    )
    if spread.std is None or spread.n < FEWEST_PAIRS or all_equal(differences):
        return found
    error = spread.std / math.sqrt(spread.n)
    reach = critical_value(CONFIDENCE, spread.n - 1) * error
    return replace(
        found,
        low=spread.mean - reach,
        high=spread.mean + reach,
        p_t=two_sided_p(spread.mean / error, spread.n - 1),
    )


def all_equal(differences: Sequence[float]) -> bool:
    """Return True where the differences are equal but for rounding.

    190 - 187 and 201 - 198 hits of 266 images give percentages that differ by 1e-14. A t test would
    take that for a spread, and find the difference certain.
    """
    return max(differences) - min(differences) <= ROUNDING * max(map(abs, differences))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the share of sign patterns whose sum is at least as far from 0 as the observed one.

    The p value is exact up to 16 pairs. With more pairs it comes from a seeded sample of patterns,
    with the observed pattern added.
    """
    size = np.abs(np.asarray(differences, dtype=np.float64))
    n = len(size)
    seen = abs(float(np.sum(differences)))
    if n <= EXACT_PAIRS:
        patterns = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
    else:
        patterns = np.random.default_rng(0).integers(0, 2, size=(DRAWS, n))
    sums = np.abs((1 - 2 * patterns) @ size)
    # Sums that are equal in exact arithmetic differ by rounding.
    extreme = int((sums >= seen - 1e-12 * size.sum()).sum())
    return extreme / len(sums) if n <= EXACT_PAIRS else (extreme + 1) / (len(sums) + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p values by Holm's method, which controls the family-wise error rate.

    The smallest of m values is multiplied by m, the next by m - 1 and so on; no corrected value is
    smaller than the one before it.

    A comparison without a test (`Difference.p_t` is None) has no place in the family: leave it out.
    """
    for place, p in enumerate(p_values):
        check(
            p is not None and 0 <= p <= 1,
            f"p_values[{place}]={p!r}; a p value lies in 0 to 1: leave out comparisons without a "
            "test, whose p_t is None",
        )
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    corrected, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = least
    return corrected
