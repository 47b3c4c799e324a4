"""Compare runs with the first run, and routers with each other over paired seeds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from acmoe.evaluate.seeds import Spread, paired_difference
from acmoe.report.groups import Condition, conditions, score_kinds
from acmoe.report.runs import RunFacts


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The metric of a run minus that of the first run."""

    value: float
    percent: float | None  # in percent of the first run's value
    step: int | None  # step at which both were measured; None if each is at its best step


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Difference between two conditions over finished runs of one group, paired by seed."""

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
    low: float | None  # 95% interval of the mean difference (paired t)
    high: float | None  # both are None with fewer than three seeds, or with equal differences

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


def paired(runs: Sequence[RunFacts]) -> list[Paired]:
    """Compare every condition of a group with the group's first, over the seeds both finished.

    A pair of conditions has one entry for validation, and one for a test score that both have.
    """
    found: list[Paired | None] = []
    first: dict[int, Condition] = {}
    for one in conditions(runs):
        if one.group not in first:
            first[one.group] = one
            continue
        found += [_validated(first[one.group], one), _tested(first[one.group], one)]
    return [pair for pair in found if pair is not None]


def _validated(first: Condition, second: Condition) -> Paired | None:
    metric = first.runs[0].metric
    if second.runs[0].metric != metric:
        return None
    return _paired(first, second, first.best(), second.best(), metric.label, metric.lower)


def _tested(first: Condition, second: Condition) -> Paired | None:
    """Pair by the kind of test score that most seeds of both conditions have."""
    most: Paired | None = None
    for kind in score_kinds(first.runs):
        for other in score_kinds(second.runs):
            if not kind.comparable(other):
                continue
            values = first.tested(kind), second.tested(other)
            found = _paired(first, second, *values, kind.label, kind.lower)
            if found is not None and (most is None or len(found.seeds) > len(most.seeds)):
                most = found
    return most


def _paired(
    first: Condition,
    second: Condition,
    left: dict[int, float],
    right: dict[int, float],
    metric: str,
    lower: bool,
) -> Paired | None:
    """Pair values by seed; None where the conditions share no seed."""
    change = paired_difference(right, left)
    if change is None:
        return None
    seeds = tuple(sorted(left.keys() & right.keys()))
    one, two = (Spread.of([values[seed] for seed in seeds]) for values in (left, right))
    return Paired(
        group=first.group,
        metric=metric,
        lower=lower,
        first=first.name,
        second=second.name,
        seeds=seeds,
        first_mean=one.mean,
        second_mean=two.mean,
        first_spread=one.std,
        second_spread=two.std,
        difference=change.mean,
        low=change.low,
        high=change.high,
    )
