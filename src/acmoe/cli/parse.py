"""Parse the arguments into a command, and report a mistake in one line instead of a box."""

import contextlib
import io
import re
from collections.abc import Sequence
from functools import reduce
from typing import Annotated, Any, Protocol, cast

import tyro

from acmoe.cli.options import registry
from acmoe.errors import UserError

ABOUT = (
    "Adaptive Clustering Mixture-of-Experts: routers, models, training, evaluation and theory. "
    "`acmoe COMMAND --help` explains a command, `acmoe --version` prints the version, and "
    "`acmoe doctor` describes the installation."
)


class Command(Protocol):
    """A parsed command. `run` does its work and returns the exit code."""

    def run(self) -> int: ...


def parse(commands: dict[str, type[Command]], arguments: Sequence[str]) -> Command:
    """Return the command that the arguments name. Without arguments, print the help and exit."""
    one_of = reduce(
        lambda left, right: left | right,
        (Annotated[command, tyro.conf.subcommand(name)] for name, command in commands.items()),
    )
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            found = tyro.cli(
                cast(Any, one_of),
                prog="acmoe",
                description=ABOUT,
                args=list(arguments) or ["--help"],
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
                registry=registry(),
            )
    except SystemExit as stop:
        if stop.code:
            raise UserError(one_line(complaint.getvalue())) from None
        raise
    return cast(Command, found)


def one_line(box: str) -> str:
    """Extract the text inside a boxed message as one line; `;` separates its sections."""
    text = ""
    for row in box.splitlines()[1:-1]:  # between the upper and the lower edge
        row = row.strip(" \u2502|")  # the sides are | on terminals without UTF-8
        text += ";" if re.fullmatch(r"[\u2500-]+", row) else f" {row}"
    return re.sub(r"[.:]?;", ";", re.sub(r"\s+", " ", text)).strip(" ;.")
