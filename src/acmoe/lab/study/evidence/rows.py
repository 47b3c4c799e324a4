"""Compare every claim of the paper with our records, setting by setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from acmoe.lab.study.evidence.claims import Claim
from acmoe.lab.study.results.pooled import PooledDifference, pooled_differences
from acmoe.lab.study.results.records import DONE, Record, latest

# refuted        the interval excludes the paper's effect and is on the wrong side of it
# supported      the interval excludes zero, on the side of the paper's effect
# undecided      the interval holds the paper's effect
# unknown        too few pairs for an interval
# An idea of our own has no effect to hold: refuted is a loss, undecided an interval with zero.
Verdict = Literal["refuted", "supported", "undecided", "unknown", "never run"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim in one setting."""

    claim: Claim
    setting: str
    ours: PooledDifference | None  # None: no pair of runs
    share: float | None  # our training tokens or images, as a share of the paper's

    @property
    def inside(self) -> bool | None:
        """True where our interval holds the paper's effect; None without one of them."""
        effect = self.claim.effect
        if self.ours is None or self.ours.low is None or self.ours.high is None or effect is None:
            return None
        return self.ours.low <= effect <= self.ours.high

    @property
    def verdict(self) -> Verdict:
        if self.ours is None:
            return "never run"
        low, high, effect = self.ours.low, self.ours.high, self.claim.effect
        if low is None or high is None:
            return "unknown"
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
    conditions.
    """
    families: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for claim in claims:
        pairs = families.setdefault(_family(claim), {})
        for setting in claim.settings:
            pairs[setting] = differences(claim, setting, records.get(claim.study, ()))
    pooled = {family: pooled_differences(pairs) for family, pairs in families.items()}
    return [
        Row(
            claim=claim,
            setting=setting,
            ours=pooled[_family(claim)].get(setting),
            share=_share(claim, setting, records.get(claim.study, ())),
        )
        for claim in claims
        for setting in claim.settings
    ]


def differences(claim: Claim, setting: str, records: Sequence[Record]) -> list[float]:
    """Return the differences of all pairs of seeds, in the claim's unit, ordered by seed."""
    figures, base = (
        {
            record["seed"]: record["metrics"][claim.metric]
            for record in _runs(records, setting)
            if record["condition"] == condition and claim.metric in record["metrics"]
        }
        for condition in (claim.condition, claim.baseline)
    )
    seeds = sorted(figures.keys() & base.keys())
    if not seeds:
        return []
    whole = fmean(base[seed] for seed in seeds) / 100 if claim.unit == "percent" else 1.0
    return [(figures[seed] - base[seed]) / whole for seed in seeds]


def _family(claim: Claim) -> tuple[str, ...]:
    return claim.study, claim.metric, claim.condition, claim.baseline


def _runs(records: Sequence[Record], setting: str) -> list[Record]:
    return [
        record
        for record in latest(records)
        if record["status"] == DONE and record["setting"] == setting
    ]


def _share(claim: Claim, setting: str, records: Sequence[Record]) -> float | None:
    runs = _runs(records, setting)
    if not runs:
        return None
    # A record's size reads "10,000 steps of 24,576 tokens".
    steps, _, _, rows, _ = runs[0]["size"].replace(",", "").split()
    return int(steps) * int(rows) / claim.length
