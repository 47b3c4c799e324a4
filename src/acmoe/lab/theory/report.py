"""Print the checks as JSON, or as a table with explanations."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from acmoe.lab.theory.check import Check

SECTIONS: tuple[tuple[str, Callable[[Check], bool]], ...] = (
    ("Not confirmed: an error in this library or in these checks", lambda c: not c.confirmed),
    (
        "Contradicted by an exact counterexample",
        lambda c: c.confirmed and c.basis == "counterexample",
    ),
    (
        "Proved under the hypotheses of the row (docs/theory.md)",
        lambda c: c.confirmed and c.basis == "proof",
    ),
    (
        "Observed in simulations, not proved",
        lambda c: c.confirmed and c.basis == "observation",
    ),
)


def all_confirmed(checks: Sequence[Check]) -> bool:
    """Return whether every measurement agrees with its second derivation."""
    return all(check.confirmed for check in checks)


def to_json(checks: Sequence[Check]) -> str:
    """Return `{"confirmed": ..., "checks": [...]}` with one object per check."""
    rows = [asdict(check) for check in checks]
    content = {"confirmed": all_confirmed(checks), "checks": rows}
    return json.dumps(content, indent=2, allow_nan=False)


def render(checks: Sequence[Check]) -> RenderableType:
    """Make a numbered table for 100 columns, followed by the explanations."""
    table = Table(box=box.HORIZONTALS, show_lines=True, expand=True)
    table.add_column("#", justify="right")
    table.add_column("statement and setting", ratio=5)
    table.add_column("measured", ratio=4)
    table.add_column("verdict", ratio=3)
    printed = ""
    for number, check in enumerate(checks, start=1):
        # Text instead of str, so that brackets are not read as markup.
        claim = Text(check.name, style="bold")
        if check.statement != printed:
            claim.append(f"\n{check.statement}", style="not bold italic")
        claim.append(f"\n{check.setting}", style="not bold dim")
        printed = check.statement
        table.add_row(
            str(number), claim, Text(check.measured), Text(check.verdict, style=_style(check))
        )
    return Group(table, *reading(checks))


def reading(checks: Sequence[Check]) -> list[RenderableType]:
    """Make the explanations, grouped by verdict and numbered as in the table."""
    parts: list[RenderableType] = []
    for title, belongs in SECTIONS:
        rows = [check for check in checks if belongs(check)]
        if not rows:
            continue
        notes = Table.grid(padding=(0, 1))
        for check in rows:
            line = Text(f"{check.name}. ", style="bold")
            line.append(check.note, style="not bold")
            notes.add_row(f"{checks.index(check) + 1:>3}", line)
        parts += [Text(f"\n{title}", style="bold underline"), notes]
    return parts


def _style(check: Check) -> str:
    if not check.confirmed:
        return "bold red"
    return {True: "green", False: "yellow", None: "cyan"}[check.holds_as_printed]
