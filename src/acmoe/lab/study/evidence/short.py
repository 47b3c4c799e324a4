"""The answer in short: two sentences from all rows, the long runs, rows for the README."""

from collections import Counter
from collections.abc import Sequence

from acmoe.errors import check
from acmoe.lab.study.evidence.rows import Row
from acmoe.lab.study.evidence.words import (
    counted_text,
    effect_text,
    interval_text,
    length_text,
    pairs_text,
    share_text,
    where_text,
)
from acmoe.lab.study.results.markdown import table

LONG = 0.05  # share of the paper's training from which a run is called long

# The README's name for a row, and the study, condition and setting that choose the row.
Shown = tuple[str, tuple[str, str, str]]
# A line for each row of the README: of its candidates, the first that has all declared pairs.
SHOWN: tuple[tuple[Shown, ...], ...] = (
    (
        (
            "words, long runs, Switch-small, perplexity",
            ("long-words", "adaptive-previous", "switch-small, dropout 0.1"),
        ),
        (
            "words, short runs, Switch-small, perplexity",
            ("words", "adaptive-previous", "switch-small, dropout 0.1"),
        ),
    ),
    (
        (
            "bytes, short runs, no balance loss and the published init, bits per byte",
            ("bytes", "adaptive-previous", "switch-enwik8, post-norm, balance 0, published init"),
        ),
    ),
    (
        (
            "bytes, long runs, balance 0.01, bits per byte",
            ("long", "adaptive-previous", "switch-enwik8, balance 0.01"),
        ),
    ),
)


def answer(rows: Sequence[Row]) -> str:
    """Say whether a comparison that was declared before its runs shows a gain.

    Rows without an interval, such as those of two declared pairs, are not counted, because they
    cannot show a gain.
    """
    verdicts = [
        row.verdict
        for row in rows
        if row.claim.effect is not None and row.claim.declared is not None
    ]
    ended = [one for one in verdicts if one in ("refuted", "undecided", "supported")]
    if not ended:
        return "Not known: no comparison has an interval and all pairs declared before its runs."
    gains = ended.count("supported")
    have = "1 comparison has" if len(ended) == 1 else f"{len(ended)} comparisons have"
    found = f"{have} an interval and all the pairs that were declared before the runs, and"
    if not gains:
        return f"Not shown: {found} none of them shows a gain."
    return f"{found} {gains} of them {_verb('show', gains)} a gain."


def headline(rows: Sequence[Row]) -> str:
    """Count the verdicts on the paper's claims, one kind of count in a sentence."""
    claims = [row for row in rows if row.claim.effect is not None]
    counts = Counter(row.verdict for row in claims)
    refuted, supported = counts["refuted"], counts["supported"]
    unknown = counts["undecided"] + counts["unknown"]
    sentences = [
        f"Of {refuted + unknown + supported} comparisons at the lengths of training that were run "
        f"here, {refuted} {_verb('exclude', refuted)} the paper's gain, {unknown} cannot tell, and "
        f"{supported} {_verb('exclude', supported)} zero, on the side of a gain{_gains(claims)}."
    ]
    if losses := sum(row.verdict == "refuted" and row.is_loss for row in claims):
        verb = _verb("exclude", losses)
        sentences.append(f"Of the {refuted}, {losses} also {verb} zero, on the side of a loss.")
    if interim := counts["interim"]:
        have = "has" if interim == 1 else "have"
        sentences.append(f"{interim} more {have} fewer pairs than declared, and no verdict yet.")
    return " ".join(sentences)


def _gains(claims: Sequence[Row]) -> str:
    """Return, for each row with a gain, its pairs and length of training; empty without any."""
    texts = []
    for row in claims:
        if row.verdict == "supported":
            smaller = ", a smaller gain than the paper's" if row.below_paper else ""
            texts.append(
                f"{pairs_text(row)} pairs, {share_text(row)} of the paper's training{smaller}"
            )
    return f" ({'; '.join(texts)})" if texts else ""


def long_runs(rows: Sequence[Row]) -> str:
    """Return a line for each claim of the paper in long runs; empty without any such run."""
    shown = [
        row
        for row in rows
        if row.claim.effect is not None
        and row.verdict not in ("never run", "secondary")
        and (row.share or 0.0) >= LONG
    ]
    if not shown:
        return ""
    lines = [
        f"- {row.claim.title.replace(', long runs', '')} ({where_text(row)}, {share_text(row)}): "
        f"{interval_text(row)}; {_answer(row)}."
        for row in shown
    ]
    return (
        f"The lines below have the runs with at least {100 * LONG:.0f}% of the paper's training; "
        "the brackets name our data, the setting and that share. enwiki15 is Wikipedia text of "
        "2015, neither EnWik-8 nor WikiText-103. Differences are the adaptive router minus the "
        "plain one; below zero is better:\n\n" + "\n".join(lines) + "\n"
    )


def _answer(row: Row) -> str:
    effect = effect_text(row)
    loss = ", and zero, on the side of a loss" if row.is_loss else ""
    return {
        "refuted": f"the interval of {row.pairs} pairs excludes the paper's {effect}{loss}",
        "supported": f"the interval of {row.pairs} pairs excludes zero, on the side of a gain",
        "undecided": f"cannot tell, the interval of {row.pairs} pairs holds the paper's {effect}",
        "unknown": f"cannot tell (the paper {effect})",
        "interim": f"no verdict yet, {counted_text(row)} (the paper {effect})",
    }[row.verdict]


def _verb(verb: str, number: int) -> str:
    return f"{verb}s" if number == 1 else verb


def short_markdown(rows: Sequence[Row]) -> str:
    """Return the sentences and the table of the README."""
    header = (
        *("setting", "adaptive minus plain, 95% interval", "the paper", "n"),
        "training, share of the paper's",
    )
    shown = table(header, [_cells(rows, one) for one in SHOWN])
    return f"**{answer(rows)}** {headline(rows)}\n\n{shown}\n"


def _cells(rows: Sequence[Row], candidates: Sequence[Shown]) -> list[str]:
    found = [(name, _row(rows, key)) for name, key in candidates]
    whole = [one for one in found if one[1].has_runs and not one[1].interim]
    name, row = (whole or found[-1:])[0]
    share = f"{share_text(row)}, {length_text(row)}" if row.share is not None else ""
    return [name, interval_text(row), effect_text(row), pairs_text(row), share]


def _row(rows: Sequence[Row], key: tuple[str, str, str]) -> Row:
    """Return the row of a study, condition and setting, in the study's first metric."""
    found = [
        row
        for row in rows
        if (row.claim.study, row.claim.condition, row.setting) == key and row.claim.metric == "test"
    ]
    check(len(found) == 1, f"{len(found)} rows of the evidence are {', '.join(key)}; expected one")
    return found[0]
