"""Compare runs with the first run, and routers with each other over paired seeds.

Runs are comparable if they differ only in the router and the seed.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from acmoe.evaluate.student import critical_value
from acmoe.report.runs import RunFacts

CONFIDENCE = 0.95  # level of the confidence intervals


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The metric of a run minus that of the first run."""

    value: float
    percent: float | None  # in percent of the first run's value
    step: int | None  # step at which both were measured; None if each is at its best step


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Difference between two routers over finished runs of one group, paired by seed."""

    group: int
    metric: str
    lower: bool  # less is better
    first: str
    second: str
    seeds: tuple[int, ...]
    first_mean: float
    second_mean: float
    first_spread: float | None  # standard deviation over seeds; None with one seed
    second_spread: float | None
    difference: float  # mean of second - first
    low: float | None  # 95% interval of the mean difference (paired t); None with one seed
    high: float | None

    @property
    def percent(self) -> float | None:
        return 100 * self.difference / abs(self.first_mean) if self.first_mean else None

    @property
    def told_from_chance(self) -> bool:
        """Return whether the interval excludes zero."""
        return self.low is not None and self.high is not None and self.low * self.high > 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "percent": self.percent, "told": self.told_from_chance}


def difference(run: RunFacts, first: RunFacts) -> Difference | None:
    """Subtract the first run's metric from this run's, or return None if they have none in common.

    If both runs have finished, each is taken at its best validation. Otherwise both are taken at
    the last step at which both were validated.
    """
    if run.metric != first.metric:
        return None
    own, base = run.best(), first.best()
    if own is None or base is None:
        return None
    if run.state == first.state == "finished":
        return _difference(own[1], base[1], None)
    own_scores, base_scores = run.scores(), first.scores()
    shared = own_scores.keys() & base_scores.keys()
    if not shared:
        return None
    step = max(shared)
    return _difference(own_scores[step], base_scores[step], step)


def _difference(own: float, base: float, step: int | None) -> Difference:
    change = own - base
    return Difference(value=change, percent=100 * change / abs(base) if base else None, step=step)


def groups(runs: Sequence[RunFacts]) -> list[int]:
    """Number the runs by group. Runs of a group differ in seed, router and data folder only."""
    seen: dict[str, int] = {}
    return [seen.setdefault(_group_key(run), len(seen)) for run in runs]


def _group_key(run: RunFacts) -> str:
    compared = {
        key: value
        for key, value in run.settings.items()
        if key not in ("seed", "data.folder", "device") and not key.startswith("model.router")
    }
    return repr((run.kind, sorted(compared.items(), key=lambda item: item[0])))


def condition(run: RunFacts) -> str:
    """Return the router's settings as text. Runs with equal settings are seeds of one condition."""
    settings = run.settings.items()
    return repr(sorted((key, repr(v)) for key, v in settings if key.startswith("model.router")))


def paired(runs: Sequence[RunFacts]) -> list[Paired]:
    """Compare every router of a group with the group's first, over the seeds both finished."""
    found = []
    numbers = groups(runs)
    for group in sorted(set(numbers)):
        own = [run for run, number in zip(runs, numbers, strict=True) if number == group]
        conditions: dict[str, list[RunFacts]] = {}
        for run in own:
            conditions.setdefault(condition(run), []).append(run)
        first, *others = conditions.values()
        for other in others:
            pair = _paired(group, first, other)
            found += [] if pair is None else [pair]
    return found


def _paired(group: int, first: list[RunFacts], other: list[RunFacts]) -> Paired | None:
    left, right = _by_seed(first), _by_seed(other)
    seeds = tuple(sorted(left.keys() & right.keys()))
    if not seeds or first[0].metric != other[0].metric:
        return None
    one, two = [left[seed] for seed in seeds], [right[seed] for seed in seeds]
    changes = [b - a for a, b in zip(one, two, strict=True)]
    several, mean = len(seeds) > 1, fmean(changes)
    half = None
    if several:
        error = stdev(changes) / math.sqrt(len(seeds))
        half = critical_value(CONFIDENCE, len(seeds) - 1) * error
    return Paired(
        group=group,
        metric=first[0].metric.label,
        lower=first[0].metric.lower,
        first=label_of(first),
        second=label_of(other),
        seeds=seeds,
        first_mean=fmean(one),
        second_mean=fmean(two),
        first_spread=stdev(one) if several else None,
        second_spread=stdev(two) if several else None,
        difference=mean,
        low=None if half is None else mean - half,
        high=None if half is None else mean + half,
    )


def _by_seed(runs: list[RunFacts]) -> dict[int, float]:
    """Map each seed to the best validation of its first finished run."""
    found: dict[int, float] = {}
    for run in runs:
        best = run.best()
        if run.state == "finished" and best is not None and run.seed is not None:
            found.setdefault(run.seed, best[1])
    return found


def label_of(runs: list[RunFacts]) -> str:
    """Return the router's name, or the name of the run if there is only one."""
    router, name = runs[0].router, runs[0].name
    if len(runs) > 1:
        return router
    return name if router in name else f"{name} ({router})"
