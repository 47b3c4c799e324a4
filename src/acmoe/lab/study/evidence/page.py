"""Write the evidence page: one table, three lists and one figure, from the records."""

import os
from collections.abc import Sequence
from pathlib import Path

from acmoe.lab.study.evidence.claims import CLAIMS
from acmoe.lab.study.evidence.figure import save_effects
from acmoe.lab.study.evidence.rows import Row, Verdict, evidence_rows
from acmoe.lab.study.results.page import write_page
from acmoe.lab.study.results.records import Record, read_results
from acmoe.lab.study.results.tables import table

SECTION = "evidence"  # of the page's markers
LISTS: tuple[tuple[str, tuple[Verdict, ...], str], ...] = (
    (
        "Refuted at our length of training",
        ("refuted",),
        "The interval excludes the paper's effect, on the side of a smaller gain or a loss; for an "
        "idea of our own, it excludes zero on the side of a loss.",
    ),
    (
        "Cannot tell",
        ("undecided", "unknown"),
        "The interval holds the paper's effect (for an idea of our own: zero), or there are too "
        "few pairs for one.",
    ),
    ("Never run", ("never run",), "Declared in a study, no pair of runs yet."),
)


def write_evidence(page: Path, records: Path, images: Path) -> list[Path]:
    """Write the table, the lists and the figure; return the written files."""
    rows = evidence_rows(CLAIMS, read_all(records))
    figures = save_effects(rows, images)
    shown = [
        Path(os.path.relpath(figure, page.parent)).as_posix()
        for figure in figures
        if figure.suffix == ".svg"
    ]
    write_page(page, SECTION, evidence_markdown(rows, shown))
    return [page, *figures]


def read_all(folder: Path) -> dict[str, list[Record]]:
    """Read the records of every study that a claim names; a missing file means no runs."""
    paths = {claim.study: folder / f"{claim.study}.jsonl" for claim in CLAIMS}
    return {study: read_results(path) for study, path in paths.items() if path.is_file()}


def evidence_markdown(rows: Sequence[Row], images: Sequence[str]) -> str:
    """Return the page's generated part; `images` are paths relative to the page."""
    header = (
        *("claim of the paper", "our setting", "our difference", "paper", "paper's effect is"),
        *("n", "training, share of the paper's", "could have been seen"),
    )
    run = [row for row in rows if row.ours is not None]
    parts = [
        table(header, [_cells(row) for row in run]),
        *(f"![Our differences as shares of the paper's effect]({image})" for image in images),
    ]
    if supported := [row for row in rows if row.verdict == "supported"]:
        parts.append(
            "## Supported\n\nThe interval excludes zero, on the paper's side. It is not "
            "corrected for the number of rows: one interval in twenty excludes the truth by chance."
        )
        parts.append(_list(supported))
    for title, verdicts, meaning in LISTS:
        found = [row for row in rows if row.verdict in verdicts]
        parts.append(f"## {title}\n\n{meaning}")
        parts.append(_list(found) if found else "Nothing.")
    return "\n\n".join(parts) + "\n"


def _list(rows: Sequence[Row]) -> str:
    return "\n".join(f"- {row.claim.title}: {row.setting}{_in_words(row)}" for row in rows)


def _in_words(row: Row) -> str:
    if row.ours is None:
        return ""
    effect = row.claim.effect
    paper = "" if effect is None else f", the paper {_signed(effect, row)}"
    return f", {_interval(row)} (n = {row.ours.n}){paper}"


def _cells(row: Row) -> list[str]:
    assert row.ours is not None
    inside = {True: "inside", False: "outside", None: "no interval"}[row.inside]
    seen, effect = row.ours.detectable, row.claim.effect
    return [
        row.claim.title,
        row.setting,
        _interval(row),
        "none" if effect is None else _signed(effect, row),
        "" if effect is None else inside,
        str(row.ours.n),
        "" if row.share is None else _share(row.share),
        "" if seen is None else f"{seen:.2f}{_unit(row)}",
    ]


def _interval(row: Row) -> str:
    ours = row.ours
    assert ours is not None
    if ours.low is None or ours.high is None:
        return _signed(ours.mean, row)
    return f"{_signed(ours.mean, row)} [{ours.low:+.2f}, {ours.high:+.2f}]"


def _signed(value: float, row: Row) -> str:
    return f"{value:+.2f}{_unit(row)}"


def _unit(row: Row) -> str:
    return "%" if row.claim.unit == "percent" else " points"


def _share(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.001 else f"{100 * share:.2g}%"
