"""Output shared by all `acmoe bench` commands: the report, progress, and the command line."""

import shlex
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from acmoe.lab.bench.harness.results import Report


def command_of(name: str, action: "DataclassInstance") -> str:
    """Return the command line that repeats the measurement."""
    words = ["acmoe", "bench", name]
    for option in fields(action):
        value = getattr(action, option.name)
        if value == option.default or option.name == "json":
            continue
        words.append(f"--{option.name}")
        if isinstance(value, tuple):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return shlex.join(words)


def say(text: str) -> None:
    """Print progress to stderr, so that stdout holds the report only."""
    print(text, file=sys.stderr, flush=True)


def show(report: "Report", *, json: bool, save: bool) -> int:
    """Print the report to stdout, and with `save` write it to a file as well."""
    from acmoe.cli.bench.terminal import terminal_tables
    from acmoe.lab.bench.harness import results
    from acmoe.lab.bench.harness.table import absences

    try:
        if json:
            print(report.to_json())
        else:
            console = Console()
            for table in terminal_tables(report, console.width):
                console.print(table)
            print(*absences(report), sep="\n")
    finally:  # also where the reader of a pipe, such as head, has left
        if save:
            print(f"wrote {results.save(report)}", file=sys.stderr)
    return 0
