"""What every `acmoe bench` command prints: its report, its progress, itself."""

import shlex
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from acmoe.lab.bench.results import Report


def command_of(name: str, action: "DataclassInstance") -> str:
    """What a reader types to take the figures again."""
    words = ["acmoe", "bench", name]
    for option in fields(action):
        value = getattr(action, option.name)
        if value == option.default or option.name == "json":
            continue
        words.append(f"--{option.name}")
        if isinstance(value, tuple):
            words += value
        elif value is not True:
            words.append(str(value))
    return shlex.join(words)


def say(text: str) -> None:
    """Progress, beside the report."""
    print(text, file=sys.stderr, flush=True)


def show(report: "Report", *, json: bool, save: bool) -> int:
    """The report on stdout, and in a file of its own where asked."""
    from acmoe.lab.bench import results
    from acmoe.lab.bench.table import absences, terminal_table

    if json:
        print(report.to_json())
    else:
        Console().print(terminal_table(report))
        print(*absences(report), sep="\n")
    if save:
        print(f"wrote {results.save(report)}", file=sys.stderr)
    return 0
