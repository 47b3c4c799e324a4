"""The result of one check: a statement of the paper, the measurement, and the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass

Figure = float | int | bool | str | list[float] | list[int]

# The paper states Proposition 2 "with high probability". Here this means: in this share of draws.
HIGH_PROBABILITY = 0.95


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table that `acmoe theory` prints.

    confirmed          The measurement agrees with a second, independent derivation (an optimiser,
                       Monte Carlo, a closed form). False means that this library or the analysis
                       in this row is wrong, whatever the paper says.
    holds_as_printed   True: the statement held in every draw of this setting. False: the setting
                       meets the assumptions and contradicts the statement. None: the setting is
                       outside the assumptions, or the statement leaves the case open.
    """

    name: str
    statement: str
    setting: str
    measured: str
    figures: Mapping[str, Figure]
    verdict: str
    holds_as_printed: bool | None
    confirmed: bool
    note: str


def judge(confirmed: bool, verdict: str, doubt: str) -> str:
    """Return the verdict, or the reason for doubt if the check is not confirmed."""
    return verdict if confirmed else f"not confirmed: {doubt}"
