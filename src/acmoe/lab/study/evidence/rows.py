"""Compare every claim of the paper with our records, setting by setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from acmoe.errors import check
from acmoe.lab.study.evidence.claims import Claim
from acmoe.lab.study.results.comparable import check_comparable
from acmoe.lab.study.results.pooled import PooledDifference, pooled_differences
from acmoe.lab.study.results.records import DONE, Record, latest

# never run      no pair of runs
# interim        fewer pairs than were declared: no verdict, whatever the interval is
# secondary      declared as not decisive: no verdict
# refuted        the interval excludes the paper's effect and is on the wrong side of it
# supported      the interval excludes zero, on the side of the paper's effect
# undecided      the interval holds the paper's effect
# unknown        too few pairs for an interval, or a run that diverged left a pair without figures
# An idea of our own has no effect to hold: refuted is a loss, undecided an interval with zero.
Verdict = Literal[
    "never run", "interim", "secondary", "refuted", "supported", "undecided", "unknown"
]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim in one setting."""

    claim: Claim
    setting: str
    ours: PooledDifference | None  # None: no pair of runs has figures
    share: float | None  # our training tokens or images, as a share of the paper's
    diverged: tuple[int, int] = (0, 0)  # runs of the condition and of the baseline that diverged
    crossing: int = 0  # pairs whose two runs are of different commits
    ran: int = 0  # pairs of runs that ended, with figures or diverged
    changed: int = 0  # runs of a working tree with uncommitted changes
    alone: PooledDifference | None = None  # `ours` with the spread of this row's own pairs
    single: tuple[float, ...] = ()  # each pair alone, by seed; percent of its own plain run

    @property
    def inside(self) -> bool | None:
        """True where our interval holds the paper's effect; None without one of them."""
        effect = self.claim.effect
        if self.ours is None or self.ours.low is None or self.ours.high is None or effect is None:
            return None
        return self.ours.low <= effect <= self.ours.high

    @property
    def below_paper(self) -> bool:
        """True where our interval excludes the paper's effect, as too large a gain."""
        effect, ours = self.claim.effect, self.ours
        if ours is None or ours.low is None or ours.high is None or effect is None:
            return False
        return ours.low > effect if effect < 0 else ours.high < effect

    @property
    def is_loss(self) -> bool:
        """True where our interval excludes zero, on the other side than the paper's effect."""
        effect, ours = self.claim.effect, self.ours
        if ours is None or ours.low is None or ours.high is None or effect is None:
            return False
        return ours.low > 0 if effect < 0 else ours.high < 0

    @property
    def interim(self) -> bool:
        """True where the row has runs, and fewer pairs were run than were declared."""
        declared = self.claim.declared
        return self.has_runs and declared is not None and max(self.ran, self.pairs) < declared

    @property
    def incomplete(self) -> bool:
        """True where a pair has no figures because a run diverged: the rest is a selection."""
        return self.pairs < self.ran

    @property
    def pairs(self) -> int:
        """The number of pairs that have figures."""
        return 0 if self.ours is None else self.ours.n

    @property
    def has_runs(self) -> bool:
        """True where a pair has figures, or has none because a run diverged."""
        return self.ours is not None or any(self.diverged)

    @property
    def verdict(self) -> Verdict:
        if not self.has_runs:
            return "never run"
        if self.interim:
            return "interim"
        if not self.claim.decisive:
            return "secondary"
        ours = self.ours
        if ours is None or ours.low is None or ours.high is None or self.incomplete:
            return "unknown"
        return self._verdict_of(ours.low, ours.high, self.claim.effect)

    @property
    def verdict_alone(self) -> Verdict:
        """The verdict with the spread of this row's own pairs; `verdict` where that is unknown."""
        alone = self.alone
        unknown = alone is None or alone.low is None or alone.high is None
        if unknown or self.verdict in ("interim", "secondary", "unknown"):
            return self.verdict
        assert alone is not None and alone.low is not None and alone.high is not None
        return self._verdict_of(alone.low, alone.high, self.claim.effect)

    def _verdict_of(self, low: float, high: float, effect: float | None) -> Verdict:
        if effect is None:
            better, worse = (
                (high < 0, low > 0) if self.claim.unit == "percent" else (low > 0, high < 0)
            )
            return "supported" if better else "refuted" if worse else "undecided"
        if (high < 0) if effect < 0 else (low > 0):
            return "supported"
        return "undecided" if low <= effect <= high else "refuted"


def evidence_rows(claims: Sequence[Claim], records: Mapping[str, Sequence[Record]]) -> list[Row]:
    """Return a row for each claim and setting; `records` are those of each study.

    The spread is pooled over all settings that belong to the same study, metric and pair of
    conditions; where some of them have all their declared pairs, the spread is theirs, so that an
    unfinished setting changes no finished row. A setting of a claim with `own_spread` has the
    spread of its own pairs.
    """
    families: dict[tuple[str, ...], dict[str, list[float]]] = {}
    finished: dict[tuple[str, ...], set[str]] = {}
    for claim in claims:
        for setting in claim.settings:
            pairs = families.setdefault(_family(claim, setting), {})
            complete = finished.setdefault(_family(claim, setting), set())
            pairs[setting] = differences(claim, setting, records.get(claim.study, ()))
            if len(pairs[setting]) >= max(1, claim.declared or 1):
                complete.add(setting)
    pooled = {
        family: pooled_differences(pairs, finished[family] or None)
        for family, pairs in families.items()
    }
    return [
        _row(
            claim,
            setting,
            pooled[_family(claim, setting)].get(setting),
            records.get(claim.study, ()),
        )
        for claim in claims
        for setting in claim.settings
    ]


def differences(claim: Claim, setting: str, records: Sequence[Record]) -> list[float]:
    """Return the differences of all pairs of seeds, in the claim's unit, ordered by seed."""
    figures = _paired_figures(claim, setting, records)
    if not figures:
        return []
    whole = fmean(plain for _, plain in figures) / 100 if claim.unit == "percent" else 1.0
    return [(found - plain) / whole for found, plain in figures]


def _paired_figures(
    claim: Claim, setting: str, records: Sequence[Record]
) -> list[tuple[float, float]]:
    """Return the figures of the condition and of the baseline, for each seed that has both."""
    figures, base = (
        {
            seed: record["metrics"][claim.metric]
            for seed, record in runs.items()
            if claim.metric in record["metrics"]
        }
        for runs in _pair_of_conditions(claim, setting, records)
    )
    return [(figures[seed], base[seed]) for seed in sorted(figures.keys() & base.keys())]


def _single(claim: Claim, setting: str, records: Sequence[Record]) -> tuple[float, ...]:
    """Return the difference of each pair alone, in the claim's unit, ordered by seed."""
    figures = _paired_figures(claim, setting, records)
    if claim.unit == "points":
        return tuple(found - plain for found, plain in figures)
    return tuple(100 * (found / plain - 1) for found, plain in figures)


def _row(
    claim: Claim, setting: str, ours: PooledDifference | None, records: Sequence[Record]
) -> Row:
    runs, base = _pair_of_conditions(claim, setting, records)
    paired = runs.keys() & base.keys()
    both = [one[seed] for one in (runs, base) for seed in paired]
    own = pooled_differences({setting: differences(claim, setting, records)})
    return Row(
        claim=claim,
        setting=setting,
        ours=ours,
        share=_share(claim, [*runs.values(), *base.values()]),
        diverged=(_diverged(runs, paired), _diverged(base, paired)),
        crossing=sum(_commit(runs[seed]) != _commit(base[seed]) for seed in paired),
        ran=sum(_has_ended(claim, runs[seed], base[seed]) for seed in paired),
        changed=sum(str(_commit(record)).endswith("-dirty") for record in both),
        alone=own.get(setting),
        single=_single(claim, setting, records),
    )


def _family(claim: Claim, setting: str) -> tuple[str, ...]:
    own = (claim.title, setting) if claim.own_spread else ()
    return claim.study, claim.metric, claim.condition, claim.baseline, *own


def _pair_of_conditions(
    claim: Claim, setting: str, records: Sequence[Record]
) -> tuple[dict[int, Record], dict[int, Record]]:
    """Return the finished runs of the condition and of the baseline, by seed.

    Raise a UserError where the records hold runs of several sizes, or pairs that differ in more
    than their router.
    """
    done = [
        record
        for record in latest(records)
        if record["status"] == DONE
        and record["setting"] == setting
        and record["condition"] in (claim.condition, claim.baseline)
    ]
    sizes = sorted({record["size"] for record in done})
    check(
        len(sizes) <= 1,
        f"{claim.study}, {setting} has runs of {' and of '.join(sizes)}; the evidence compares "
        "runs of one size: move the others into another file",
    )
    check_comparable(done)
    return tuple(  # type: ignore[return-value]
        {record["seed"]: record for record in done if record["condition"] == condition}
        for condition in (claim.condition, claim.baseline)
    )


def _diverged(runs: Mapping[int, Record], seeds: set[int]) -> int:
    return sum(runs[seed]["metrics"].get("diverged", 0.0) > 0 for seed in seeds)


def _has_ended(claim: Claim, run: Record, base: Record) -> bool:
    """Return True where both runs have the figure, or one diverged; older runs may not have it."""
    metrics = [record["metrics"] for record in (run, base)]
    diverged = any(found.get("diverged", 0.0) > 0 for found in metrics)
    return diverged or all(claim.metric in found for found in metrics)


def _commit(record: Record) -> object:
    return (record.get("environment") or {}).get("commit")


def _share(claim: Claim, runs: Sequence[Record]) -> float | None:
    if not runs:
        return None
    # A record's size reads "10,000 steps of 24,576 tokens".
    steps, _, _, rows, _ = runs[0]["size"].replace(",", "").split()
    return int(steps) * int(rows) / claim.length
