"""Write the evidence page: the answer, one table, three lists and one figure, from the records.

A page has some of four generated sections, each between its markers: `evidence-headline` (the
answer, and a line for each of the long runs), `evidence` (table, figure and lists),
`evidence-short` (the README's answer and rows) and `runs` (all studies and the number of their
runs).
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from acmoe.errors import UserError, check
from acmoe.lab.study.evidence.claims import CLAIMS
from acmoe.lab.study.evidence.figure import save_effects
from acmoe.lab.study.evidence.own_ideas import MEANINGS, own_ideas
from acmoe.lab.study.evidence.rows import Row, Verdict, evidence_rows
from acmoe.lab.study.evidence.runs import runs_markdown
from acmoe.lab.study.evidence.short import answer, headline, long_runs, short_markdown
from acmoe.lab.study.evidence.words import (
    command_text,
    diverged_text,
    effect_text,
    interval_text,
    pairs_text,
    share_text,
    unit,
    where_text,
)
from acmoe.lab.study.results.markdown import table
from acmoe.lab.study.results.page import markers, shown_figures, write_page
from acmoe.lab.study.results.records import Record, read_results

SECTION, HEADLINE, SHORT, RUNS = "evidence", "evidence-headline", "evidence-short", "runs"
IN_FAVOUR = "## In favour"
INTERIM = "### Interim: fewer pairs than declared"
# Headings in their order, the verdicts below each, and what these mean. A heading of the third
# level is left out where no row is below it.
LISTS: tuple[tuple[str, tuple[Verdict, ...], str], ...] = (
    (
        "## Refuted at our length of training",
        ("refuted",),
        "The interval excludes the paper's effect, on the side of a smaller gain or a loss; where "
        "it also excludes zero, the brackets say so.",
    ),
    (
        "## Cannot tell",
        ("undecided", "unknown"),
        "The interval holds the paper's effect, there are too few pairs for one, or a run that "
        "diverged left a pair without figures. A row needs as many pairs as a 5% test does to find "
        "the paper's effect in 80% of all cases, at the spread of the table.",
    ),
    (
        INTERIM,
        ("interim",),
        "Some of the pairs that were declared before the runs are missing: there is no verdict "
        "yet, whatever the interval is. The command of each line makes the missing runs.",
    ),
    (
        "### Secondary",
        ("secondary",),
        "All declared pairs are there, and the comparison was declared as not decisive.",
    ),
    (
        "## Never run",
        ("never run",),
        "Declared in a study, no pair of runs yet. The command of each line makes the runs.",
    ),
)


def write_evidence(page: Path, records: Path, images: Path) -> list[Path]:
    """Write the generated sections that the page has; return the written files."""
    rows = evidence_rows(CLAIMS, read_all(records))
    sections = _sections(page)
    figures: tuple[Path, ...] = ()
    if SECTION in sections:
        figures = save_effects(rows, images)
    shown = shown_figures(figures, page)
    contents = {
        HEADLINE: lambda: f"**{answer(rows)}** {headline(rows)}\n\n{long_runs(rows)}",
        SECTION: lambda: evidence_markdown(rows, shown),
        SHORT: lambda: short_markdown(rows),
        RUNS: lambda: runs_markdown(records),
    }
    for name in sections:
        write_page(page, name, contents[name]())
    return [page, *figures]


def _sections(page: Path) -> list[str]:
    """Return the generated sections whose markers the page has."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {page}: {error.strerror}; give a page that exists") from error
    found = [name for name in (HEADLINE, SECTION, SHORT, RUNS) if markers(name)[0] in text]
    check(bool(found), f"{page} has none of the markers, such as {markers(SECTION)[0]}; add them")
    return found


def read_all(folder: Path) -> dict[str, list[Record]]:
    """Read the records of every study that a claim names; a missing file means no runs."""
    paths = {claim.study: folder / f"{claim.study}.jsonl" for claim in CLAIMS}
    return {study: read_results(path) for study, path in paths.items() if path.is_file()}


def evidence_markdown(rows: Sequence[Row], images: Sequence[str]) -> str:
    """Return the table, the figure and the lists; `images` are paths relative to the page."""
    header = (
        *("claim of the paper", "our data and setting", "our difference", "paper"),
        *(
            "paper's effect against our interval",
            "n",
            "training, share of the paper's",
            "could have been seen",
        ),
    )
    run = [row for row in rows if row.has_runs]
    parts = [table(header, [_cells(row) for row in run])]
    parts += [text for text in (_crossing(run), _changed(run), _pooling(run)) if text]
    parts += [f"![Our differences as shares of the paper's effect]({image})" for image in images]
    claims = [row for row in rows if row.claim.effect is not None]
    if supported := [row for row in claims if row.verdict == "supported"]:
        parts.append(
            f"{IN_FAVOUR}\n\nThe interval excludes zero, on the side of a gain. Intervals are not "
            "corrected for the number of rows: one in twenty excludes the truth by chance, so that "
            "a single row without a declared test confirms nothing."
        )
        parts.append(_list(supported))
    for heading, verdicts, meaning in LISTS:
        found = [row for row in claims if row.verdict in verdicts]
        if found or not heading.startswith("###"):
            parts.append(f"{heading}\n\n{meaning}")
            parts.append(_list(found) if found else "Nothing.")
    return "\n\n".join([*parts, *own_ideas(rows)]) + "\n"


def _crossing(rows: Sequence[Row]) -> str:
    """Name the rows in which some pairs have two runs of different commits."""
    found = [f"{row.claim.condition} in {row.setting} ({row.crossing})" for row in rows]
    found = [text for text, row in zip(found, rows, strict=True) if row.crossing]
    return f"Pairs whose two runs are of different commits: {'; '.join(found)}." if found else ""


def _changed(rows: Sequence[Row]) -> str:
    """Name the rows with runs whose code no commit has exactly."""
    found = [
        f"{row.claim.condition} in {row.setting} ({row.changed} of {2 * row.pairs} runs)"
        for row in rows
        if row.changed
    ]
    if not found:
        return ""
    return (
        f"Runs of a working tree with uncommitted changes, whose code no commit has exactly: "
        f"{'; '.join(found)}."
    )


def _pooling(rows: Sequence[Row]) -> str:
    """Name the rows that would be in another list with the spread of their own pairs."""
    lists = {verdict: heading for heading, verdicts, _ in LISTS for verdict in verdicts}
    lists["supported"] = IN_FAVOUR
    found = []
    for row in rows:
        alone = row.alone
        if row.verdict_alone == row.verdict or alone is None or alone.low is None:
            continue
        heading = lists[row.verdict_alone].strip("# ")
        if row.claim.effect is None:
            heading, _ = MEANINGS[row.verdict_alone]
        found.append(
            f'{row.claim.title}, {row.setting}: [{alone.low:+.2f}, {alone.high:+.2f}], "{heading}"'
        )
    if not found:
        return "With the spread of its own pairs in place of the pooled one, no row changes lists."
    return (
        "Rows that the spread of their own pairs, in place of the pooled one, would move to "
        f"another list: {'; '.join(found)}."
    )


def _list(rows: Sequence[Row]) -> str:
    """Return a line for each claim with its settings; the figures are in the table."""
    lines = []
    for claim, group in groupby(rows, lambda row: row.claim):
        found = list(group)
        settings = "; ".join(f"{row.setting}{_remark(row)}" for row in found)
        missing = [row.setting for row in found if row.interim or not row.has_runs]
        command = f"; `{command_text(claim, missing)}`" if missing else ""
        lines.append(f"- {claim.title}: {settings}{command}")
    return "\n".join(lines)


def _remark(row: Row) -> str:
    """Return, in brackets, what a row of a list has to say beyond its heading; often nothing."""
    remarks = {
        "supported": ["less than the paper's gain"] if row.below_paper else [],
        "refuted": ["a loss"] if row.is_loss else [],
        "undecided": _pairs_needed(row),
        "unknown": [f"n = {row.pairs}"],
        "interim": [f"{pairs_text(row)} pairs"],
        "secondary": [f"n = {row.pairs}"],
        "never run": [],
    }[row.verdict]
    remarks += [diverged_text(row)] if any(row.diverged) else []
    return f" ({', '.join(remarks)})" if remarks else ""


def _pairs_needed(row: Row) -> list[str]:
    """Return the number of pairs that would show the paper's effect; empty if these are enough.

    The smallest difference that n pairs find falls as 1 / sqrt(n).
    """
    effect, seen = row.claim.effect, None if row.ours is None else row.ours.detectable
    if effect is None or seen is None or seen <= abs(effect):
        return []
    needed = row.pairs * (seen / effect) ** 2
    return [f"needs {float(f'{needed:.2g}'):,.0f} pairs"]


def _cells(row: Row) -> list[str]:
    inside = {True: "inside", False: "outside", None: "no interval"}[row.inside]
    seen = None if row.ours is None else row.ours.detectable
    return [
        row.claim.title,
        where_text(row),
        interval_text(row),
        effect_text(row),
        "" if row.claim.effect is None else inside + ("; pairs are missing" if row.interim else ""),
        pairs_text(row),
        share_text(row),
        "" if seen is None else f"{seen:.2f}{unit(row)}",
    ]
