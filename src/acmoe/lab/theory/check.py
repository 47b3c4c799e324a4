"""One statement of the paper, what was measured about it, and the verdict the numbers give."""

from collections.abc import Mapping
from dataclasses import dataclass

Figure = float | int | bool | str | list[float] | list[int]

# The paper states Proposition 2 "with high probability"; this share of draws is taken for it.
HIGH_PROBABILITY = 0.95


@dataclass(frozen=True, kw_only=True)
class Check:
    """A row of the table.

    confirmed          the measurement agrees with its second, independent derivation (an
                       optimiser, Monte Carlo, a closed form). False means that this library or
                       the analysis in this row is wrong, whatever the paper says.
    holds_as_printed   True: the statement held in every draw of this setting. False: the setting
                       meets the statement and contradicts it. None: the setting lies outside
                       what the statement or its section says, or the statement leaves it open.
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
    """The verdict, or why there is none."""
    return verdict if confirmed else f"not confirmed: {doubt}"
