"""The answer in short: one sentence from all rows, and three rows for the README."""

from collections import Counter
from collections.abc import Sequence

from acmoe.errors import check
from acmoe.lab.study.evidence.rows import Row
from acmoe.lab.study.evidence.words import effect_text, interval_text, pairs_text, share_text
from acmoe.lab.study.results.markdown import table

# The README's name for a row, and the study, condition and setting that choose the row.
SHOWN = (
    (
        "words, Switch-small, perplexity",
        ("words", "adaptive-previous", "switch-small, dropout 0.1"),
    ),
    (
        "bytes, short runs, no balance loss and the published init, bits per byte",
        ("bytes", "adaptive-previous", "switch-enwik8, post-norm, balance 0, published init"),
    ),
    (
        "bytes, long runs, balance 0.01, bits per byte",
        ("long", "adaptive-previous", "switch-enwik8, balance 0.01"),
    ),
)


def headline(rows: Sequence[Row]) -> str:
    """Count the verdicts on the paper's claims, in one sentence."""
    counts = Counter(row.verdict for row in rows if row.claim.effect is not None)
    refuted, supported = counts["refuted"], counts["supported"]
    unknown = counts["undecided"] + counts["unknown"]
    parts = [
        f"At the lengths of training that were run here, {refuted} of "
        f"{refuted + unknown + supported} comparisons {_verb('exclude', refuted)} the paper's "
        f"gain, {unknown} cannot tell, and {supported} {_verb('exclude', supported)} zero on the "
        "paper's side"
    ]
    if interim := counts["interim"]:
        have = "has" if interim == 1 else "have"
        parts.append(f"{interim} more {have} fewer pairs than declared, and no verdict yet")
    return "; ".join(parts) + "."


def _verb(verb: str, number: int) -> str:
    return f"{verb}s" if number == 1 else verb


def short_markdown(rows: Sequence[Row]) -> str:
    """Return the sentence and the table of the README."""
    header = (
        *("setting", "adaptive minus plain, 95% interval", "the paper", "n"),
        "share of the paper's training",
    )
    return f"{headline(rows)}\n\n{table(header, [_cells(rows, *one) for one in SHOWN])}\n"


def _cells(rows: Sequence[Row], name: str, key: tuple[str, str, str]) -> list[str]:
    found = [
        row
        for row in rows
        if (row.claim.study, row.claim.condition, row.setting) == key and row.claim.metric == "test"
    ]
    check(len(found) == 1, f"{len(found)} rows of the evidence are {', '.join(key)}; expected one")
    (row,) = found
    return [name, interval_text(row), effect_text(row), pairs_text(row), share_text(row)]
