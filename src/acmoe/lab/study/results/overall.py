"""One comparison over all settings of a study: a summary, not one of the study's tests.

All settings have the same weight, however many seeds they have. The interval is for the mean over
exactly these settings: it contains the spread of pairs within each setting, not the spread between
settings.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from acmoe.evaluate.seeds import CONFIDENCE, FEWEST_PAIRS, Spread, all_equal
from acmoe.evaluate.student import critical_value
from acmoe.lab.study.results.summary import Group
from acmoe.lab.study.study import Study


class Overall(NamedTuple):
    """Differences in percent of the baseline's mean in the same setting."""

    settings: int
    pairs: int
    above: int  # pairs with a difference above 0
    mean: float  # mean of the settings' means
    low: float  # lower end of the 95 % interval
    high: float


def overall(study: Study, groups: Sequence[Group]) -> dict[tuple[str, str], Overall]:
    """Return results by condition and baseline; empty if a study has several primary metrics."""
    if len(study.primary) != 1:
        return {}
    found = {}
    for condition, baseline in study.comparisons:
        percents = [_percents(study.primary[0].key, group, condition, baseline) for group in groups]
        if (seen := mean_of_settings(percents)) is not None:
            found[condition, baseline] = seen
    return found


def _percents(key: str, group: Group, condition: str, baseline: str) -> list[float]:
    """Return pair differences in percent of the mean baseline; a single baseline may be near 0."""
    figures, base = (group.by_seed(name, key) for name in (condition, baseline))
    seeds = sorted(figures.keys() & base.keys())
    whole = math.fsum(base[seed] for seed in seeds) / max(1, len(seeds))
    return [100 * (figures[seed] - base[seed]) / whole for seed in seeds] if whole else []


def mean_of_settings(percents: Sequence[Sequence[float]]) -> Overall | None:
    """Average the settings that have a spread; None where fewer than two have one.

    A setting has a spread if it has three or more pairs that are not all equal. The variance of the
    mean adds up the variances of the settings' means; the degrees of freedom are Welch's and
    Satterthwaite's.
    """
    several = [values for values in percents if len(values) >= FEWEST_PAIRS]
    known = [(values, Spread.of(values)) for values in several if not all_equal(values)]
    if len(known) < 2:
        return None
    count = len(known)
    mean = math.fsum(spread.mean for _, spread in known) / count
    parts = [((spread.std or 0.0) / count) ** 2 / spread.n for _, spread in known]
    variance = math.fsum(parts)
    freedom = variance**2 / math.fsum(
        part**2 / (spread.n - 1) for part, (_, spread) in zip(parts, known, strict=True)
    )
    reach = critical_value(CONFIDENCE, freedom) * math.sqrt(variance)
    return Overall(
        settings=count,
        pairs=sum(spread.n for _, spread in known),
        above=sum(value > 0 for values, _ in known for value in values),
        mean=mean,
        low=mean - reach,
        high=mean + reach,
    )
