"""Arguments to a command, with one line instead of a box when they are wrong."""

import contextlib
import io
import re
from collections.abc import Sequence
from functools import reduce
from typing import Annotated, Any, Protocol, cast

import tyro

from acmoe.errors import UserError

ABOUT = (
    "Adaptive Clustering Mixture-of-Experts: routers, models, training, evaluation and theory. "
    "`acmoe COMMAND --help` explains a command."
)


class Command(Protocol):
    """What a parsed command can do: its work, returning the exit code."""

    def run(self) -> int: ...


def parse(commands: dict[str, type[Command]], arguments: Sequence[str]) -> Command:
    """The command the arguments ask for; without any, the help."""
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
            )
    except SystemExit as stop:
        if stop.code:
            raise UserError(one_line(complaint.getvalue())) from None
        raise
    return cast(Command, found)


def one_line(box: str) -> str:
    """The sentence inside a boxed message: what was wrong, what was meant, where to look."""
    text = ""
    for row in box.splitlines()[1:-1]:  # between the upper and the lower edge
        row = row.strip(" \u2502|")  # terminals without UTF-8 get | for the sides
        text += ";" if re.fullmatch(r"[\u2500-]+", row) else f" {row}"
    return re.sub(r"[.:]?;", ";", re.sub(r"\s+", " ", text)).strip(" ;.")
