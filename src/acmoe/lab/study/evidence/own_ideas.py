"""The section of the evidence page about ideas of our own, which have no figure of the paper."""

from collections.abc import Sequence

from acmoe.lab.study.evidence.rows import Row, Verdict
from acmoe.lab.study.evidence.words import (
    command_text,
    counted_text,
    diverged_text,
    interval_text,
)

HEADING = "## Ideas of our own"
# The verdict in the words of the declaration (docs/studies/long.md), and what it means.
MEANINGS: dict[Verdict, tuple[str, str]] = {
    "supported": ("helps", "the interval excludes zero, on the side of a gain"),
    "refuted": ("hurts", "the interval excludes zero, on the side of a loss"),
    "undecided": (
        "no difference shown",
        "the interval holds zero, so that the idea did not beat the plain router",
    ),
    "unknown": (
        "cannot tell",
        "there are too few pairs for an interval, or a run that diverged left a pair without "
        "figures",
    ),
    "interim": ("no verdict yet", "fewer pairs than declared"),
    "secondary": ("not decisive", "declared as secondary"),
    "never run": ("never run", "no pair of runs yet"),
}


def own_ideas(rows: Sequence[Row]) -> list[str]:
    """Return the section's parts: a heading, its explanation, and a line for each idea.

    Empty where no row is of an idea of our own.
    """
    own = [row for row in rows if row.claim.effect is None]
    if not own:
        return []
    return [
        HEADING,
        "Each predicts a gain over the plain router, and is held against zero. The headline does "
        "not count them.",
        "\n".join(_line(row) for row in own),
    ]


def _line(row: Row) -> str:
    claim = row.claim
    verdict, meaning = MEANINGS[row.verdict]
    found = ""
    if row.has_runs:
        diverged = f"; {diverged_text(row)}" if any(row.diverged) else ""
        found = f" {interval_text(row)} ({counted_text(row)}){diverged}."
    if row.interim or not row.has_runs:
        found += f" `{command_text(claim, [row.setting])}` makes the missing runs."
    title = claim.title.removeprefix("our own idea: ")
    declared = f" The test was [declared before its runs]({claim.declaration})."
    return (
        f"- {title} (`{claim.condition}`), {row.setting}: **{verdict}**, {meaning}.{found}"
        f"{declared if claim.declaration else ''}"
    )
