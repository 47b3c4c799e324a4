"""The result of one check: a statement of the paper, the measurement, and the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Figure = float | int | bool | str | list[float] | list[int]

# proof            docs/theory.md proves it under the hypotheses that `setting` names
# counterexample   one exact example contradicts the statement, or a converse of it
# observation      counted on random draws; nothing is proved
Basis = Literal["proof", "counterexample", "observation"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table that `acmoe theory` prints.

    confirmed          The measurement, made with the library's scale, weights or routers, agrees
                       with a second, independent derivation (a closed form, an optimiser, Monte
                       Carlo), and the verdict holds for the measured numbers. False means that this
                       library or the analysis in this row is wrong, whatever the paper says.
    holds_as_printed   True: proved under the printed assumptions. False: the setting meets the
                       printed assumptions and contradicts the statement. None: the row adds
                       assumptions, or the paper leaves the case open.
    """

    name: str
    statement: str
    setting: str
    measured: str
    figures: Mapping[str, Figure]
    verdict: str
    basis: Basis
    holds_as_printed: bool | None
    confirmed: bool
    note: str


def conclude(
    confirmed: bool,
    *,
    name: str,
    statement: str,
    setting: str,
    measured: str,
    figures: Mapping[str, Figure],
    verdict: str,
    doubt: str,
    basis: Basis,
    holds_as_printed: bool | None,
    note: str,
) -> Check:
    """Return the row of a check, whose verdict on the paper stands only if it is confirmed.

    Otherwise the row gives the reason for doubt, and `holds_as_printed` is None.
    """
    return Check(
        name=name,
        statement=statement,
        setting=setting,
        measured=measured,
        figures=figures,
        verdict=verdict if confirmed else f"not confirmed: {doubt}",
        basis=basis,
        holds_as_printed=holds_as_printed if confirmed else None,
        confirmed=confirmed,
        note=note,
    )
