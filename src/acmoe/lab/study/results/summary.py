"""Summarise the records of a study: spreads, paired differences and corrected tests."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from acmoe.errors import check
from acmoe.evaluate.seeds import (
    FEWEST_PAIRS,
    Difference,
    Spread,
    holm,
    paired_difference,
)
from acmoe.lab.study.results.comparable import check_comparable
from acmoe.lab.study.results.records import DONE, Record, latest
from acmoe.lab.study.study import Metric, Study

STEP_TIME = "step_ms"  # it depends on how many cells share the device


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A condition compared with its baseline, in one setting and one metric."""

    group: str
    metric: Metric
    condition: str
    baseline: str
    difference: Difference
    declared: int | None  # pairs that were declared for the setting; None: no number was
    lost: int  # pairs that have no figures because a run diverged; `difference` is of the others
    # The difference in percent of the baseline's mean over the pairs; None where that is 0.
    relative: float | None
    # Corrected over the study's tested comparisons in this metric; None for one without a test.
    holm_t: float | None
    holm_flip: float | None

    @property
    def interim(self) -> bool:
        """True where fewer pairs were run than were declared."""
        return self.declared is not None and self.difference.n + self.lost < self.declared

    @property
    def pairs(self) -> str:
        """The number of pairs in words: "1 of 4" of those declared, "3, 1 diverged"."""
        count = self.difference.n
        found = f"{count} of {self.declared}" if self.interim else str(count)
        return f"{found}, {self.lost} diverged" if self.lost else found

    @property
    def tested(self) -> bool:
        """True where the comparison has a test; with declared pairs, three are the fewest."""
        return _is_tested(self.difference, self.declared, self.lost)


def jobs_of(record: Record) -> int:
    """Return the number of cells that ran at once on the record's device."""
    return int(record["environment"].get("jobs", 1))


class Group:
    """The runs of one setting at one size; only these are compared with each other."""

    def __init__(self, setting: str, size: str, records: Sequence[Record]) -> None:
        self.setting, self.size, self.records = setting, size, records
        self.runs: dict[tuple[str, int], Record] = {}
        for record in records:
            key = (record["condition"], record["seed"])
            check(
                key not in self.runs,
                f"two different runs of {setting}, {size}, {key[0]}, seed {key[1]}: their configs "
                "or data differ; move the older line into another file",
            )
            self.runs[key] = record
        check_comparable(records)

    @property
    def title(self) -> str:
        """Setting and size in words."""
        return f"{self.setting}; {self.size}"

    @property
    def jobs(self) -> list[int]:
        """The numbers of cells that ran at once, ascending."""
        return sorted({jobs_of(record) for record in self.records})

    @property
    def timed_jobs(self) -> int:
        """The number of cells at once whose step times are shown: that of the most runs."""
        counts = Counter(map(jobs_of, self.records))
        return min(counts, key=lambda jobs: (-counts[jobs], jobs))

    @property
    def conditions(self) -> list[str]:
        """The conditions, in the order in which they first ran."""
        return list(dict.fromkeys(condition for condition, _ in self.runs))

    def by_seed(self, condition: str, key: str) -> dict[int, float]:
        """Return a metric of a condition by seed; seeds without the metric are left out.

        Times are those of the runs with `timed_jobs` cells at once: others are not comparable.
        """
        return {
            seed: record["metrics"][key]
            for (name, seed), record in self.runs.items()
            if name == condition
            and key in record["metrics"]
            and (key != STEP_TIME or jobs_of(record) == self.timed_jobs)
        }

    def lost(self, condition: str, baseline: str, key: str) -> int:
        """Return the number of pairs without the metric of which a run diverged."""
        pairs = [
            (record["metrics"], self.runs[baseline, seed]["metrics"])
            for (name, seed), record in self.runs.items()
            if name == condition and (baseline, seed) in self.runs
        ]
        return sum(
            any(key not in metrics for metrics in pair)
            and any(metrics.get("diverged", 0.0) > 0 for metrics in pair)
            for pair in pairs
        )

    def spread(self, condition: str, key: str) -> Spread | None:
        """Return mean and standard deviation over seeds; None where no run has the metric."""
        values = self.by_seed(condition, key)
        return Spread.of([values[seed] for seed in sorted(values)]) if values else None

    def curves(self, condition: str, name: str) -> list[list[tuple[int, float]]]:
        """Return the curve of each seed."""
        return [
            [(step, value) for step, value in record["curves"][name]]
            for (found, _), record in sorted(self.runs.items())
            if found == condition and name in record.get("curves", {})
        ]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The groups of a study, and all comparisons between their conditions."""

    study: Study
    groups: tuple[Group, ...]
    comparisons: tuple[Compared, ...]
    failed: tuple[Record, ...]

    def in_group(self, group: Group) -> list[Compared]:
        """Return the comparisons of one group."""
        return [one for one in self.comparisons if one.group == group.title]


def summarise(study: Study, records: Sequence[Record]) -> Summary:
    """Make every comparison that the study defines and the records allow."""
    found = [record for record in latest(records) if record["study"] == study.name]
    done = [record for record in found if record["status"] == DONE]
    check(
        bool(done),
        f"no finished run of the study {study.name!r} in these results; give --out the file of "
        "some, or run the study",
    )
    grouped: dict[tuple[str, str], list[Record]] = {}
    for record in done:
        grouped.setdefault((record["setting"], record["size"]), []).append(record)
    groups = tuple(Group(*key, members) for key, members in grouped.items())
    comparisons = [one for metric in study.compared for one in _compared(study, metric, groups)]
    failed = tuple(record for record in found if record["status"] != DONE)
    return Summary(study=study, groups=groups, comparisons=tuple(comparisons), failed=failed)


def _compared(study: Study, metric: Metric, groups: Sequence[Group]) -> list[Compared]:
    """Compare in one metric; all settings and comparisons form one family for the correction.

    A comparison without a test, such as one of fewer pairs than declared, is not in the family.
    """
    found = []
    for group in (group for group in groups if metric.is_of(group.setting)):
        for condition, baseline in study.comparisons:
            base = group.by_seed(baseline, metric.key)
            difference = paired_difference(group.by_seed(condition, metric.key), base)
            if difference is not None:
                lost = group.lost(condition, baseline, metric.key)
                found.append((group, condition, baseline, lost, difference))
    tested = [
        _is_tested(difference, study.declared(group.setting), lost)
        for group, *_, lost, difference in found
    ]
    differences = [difference for *_, difference in found]
    holm_t = _holm_where(tested, [difference.p_t for difference in differences])
    flips = _holm_where(tested, [difference.p_flip for difference in differences])
    return [
        Compared(
            group=group.title,
            metric=metric,
            condition=condition,
            baseline=baseline,
            difference=difference,
            declared=study.declared(group.setting),
            lost=lost,
            relative=_percent(difference, group, condition, baseline, metric.key),
            holm_t=p_t,
            holm_flip=flip,
        )
        for (group, condition, baseline, lost, difference), p_t, flip in zip(
            found, holm_t, flips, strict=True
        )
    ]


def _is_tested(difference: Difference, declared: int | None, lost: int) -> bool:
    """Return False for too few pairs, and for those that divergence left: they are a selection."""
    if lost:
        return False
    return declared is None or difference.n >= max(declared, FEWEST_PAIRS)


def _holm_where(tested: Sequence[bool], p_values: Sequence[float | None]) -> list[float | None]:
    """Correct the p values of tested comparisons as one family; None for all others."""
    family = {
        place: p
        for place, (test, p) in enumerate(zip(tested, p_values, strict=True))
        if test and p is not None
    }
    corrected = dict(zip(family, holm(list(family.values())), strict=True))
    return [corrected.get(place) for place in range(len(p_values))]


def _percent(
    difference: Difference, group: Group, condition: str, baseline: str, key: str
) -> float | None:
    """Return the difference in percent of the baseline's mean over the seeds of the pairs."""
    paired, base = group.by_seed(condition, key).keys(), group.by_seed(baseline, key)
    mean = Spread.of([value for seed, value in base.items() if seed in paired]).mean
    return 100 * difference.mean / mean if mean else None
