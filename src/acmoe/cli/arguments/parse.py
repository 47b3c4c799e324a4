"""Parse the arguments into a command, and report a mistake in one line instead of a box."""

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import reduce
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Protocol, cast, get_type_hints

import tyro

from acmoe.cli.arguments.help_page import HeldOutput, fitted
from acmoe.cli.arguments.option_help import registry
from acmoe.errors import UserError, check, suggest

ABOUT = (
    "Adaptive Clustering Mixture-of-Experts: routers, models, training, evaluation and theory. "
    "`acmoe COMMAND --help` explains a command, `acmoe --version` prints the version, and "
    "`acmoe doctor` describes the installation."
)

# Advice for options that a command does not have.
ADVICE = {"train": "; settings are written KEY=VALUE, such as steps=200"}


class Command(Protocol):
    """A parsed command. `run` does its work and returns the exit code."""

    def run(self) -> int: ...


def parse(commands: dict[str, type[Command]], arguments: Sequence[str]) -> Command:
    """Return the command that the arguments name. Without arguments, print the help and exit."""
    name, *rest = arguments or ["--help"]
    if name in commands:
        # Only this command is parsed, so that a mistake in its options names no other command.
        found = _parse(commands[name], rest, prog=f"acmoe {name}", advice=ADVICE.get(name, ""))
        _check_given_once(found, rest)
        _check_values(found)
        return cast(Command, found)
    check(name.startswith("-"), f"command {name!r} is unknown; {suggest(name, commands, most=2)}")
    one_of = reduce(
        lambda left, right: left | right,
        (Annotated[command, tyro.conf.subcommand(name)] for name, command in commands.items()),
    )
    return cast(Command, _parse(one_of, [name, *rest], prog="acmoe", description=ABOUT))


def _parse(
    kind: Any, arguments: list[str], *, prog: str, description: str | None = None, advice: str = ""
) -> object:
    """Parse arguments into an object of `kind`; `advice` ends the report of an unknown option."""
    page, complaint = HeldOutput(sys.stdout), io.StringIO()
    try:
        with contextlib.redirect_stdout(page), contextlib.redirect_stderr(complaint):
            return tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=arguments,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
                registry=registry(),
            )
    except SystemExit as stop:
        if stop.code:
            text = _shorter(one_line(complaint.getvalue()))
            unknown = text.startswith("Unrecognized options:")
            if advice and unknown and "=" in text.split(":", 1)[1].split(";", 1)[0]:
                advice = "; write all settings in one row, as in steps=200 lr=1e-3 --out FOLDER"
            raise UserError(text + advice if unknown else text) from None
        print(fitted(page.getvalue()), end="", flush=True)
        raise


# How tyro reports an unknown option or subcommand, as one line.
_UNKNOWN = re.compile(
    r"(Unrecognized options: ([^\s,;]+)[^;]*); (Perhaps you meant|Available subcommands): "
    r"(.*)(; For full helptext, run .*)"
)


def _shorter(text: str) -> str:
    """Replace the help texts of similar options, or all names of subcommands, by what is meant.

    The options of `acmoe bench` have a help text for each of its subcommands.
    """
    found = _UNKNOWN.fullmatch(text)
    if found is None:
        return text
    begin, wrong, heading, listed, end = found.groups()
    if heading == "Available subcommands":
        return f"{begin}; {suggest(wrong, listed.split(', '))}{end}"
    near = get_close_matches(_spelling(wrong), set(re.findall(r"--[a-z][a-z-]*", listed)), n=3)
    return f"{begin}; did you mean {' or '.join(near)}?{end}" if near else text


def _check_given_once(command: object, arguments: Sequence[str]) -> None:
    """Check that no option is repeated: all but its last values would be dropped unnoticed."""
    aliases = _aliases(command)
    before = takewhile(lambda one: one != "--", arguments)  # no option follows `--`
    spelled = [_spelling(one) for one in before]
    # Any other argument with one dash is a value, such as -1 and -inf.
    options = [aliases.get(one, one) for one in spelled if one[:2] == "--" or one in aliases]
    twice = next((one for one in options if options.count(one) > 1), None)
    check(twice is None, f"{twice} is given twice; give it once, with all its values")


def _spelling(argument: str) -> str:
    """Return the name of an option without its value: --top-k of --top_k=3, -o of -oFILE."""
    long = argument.startswith("--")
    return argument.split("=", 1)[0].replace("_", "-") if long else argument[:2]


def _aliases(command: object) -> dict[str, str]:
    """Return the options that have other names too, by these, such as --out by -o."""
    subcommands = [value for value in vars(command).values() if is_dataclass(value)]
    return {
        alias: "--" + field.replace("_", "-")
        for one in (command, *subcommands)
        for field, hint in get_type_hints(type(one), include_extras=True).items()
        for note in getattr(hint, "__metadata__", ())
        for alias in getattr(note, "aliases", None) or ()
    }


def _check_values(command: object) -> None:
    """Check the paths and the whole numbers of a command and of its subcommand."""
    for field in fields(cast(Any, command)):
        value = getattr(command, field.name)
        if is_dataclass(value):  # a subcommand, as of `acmoe data`
            _check_values(value)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Path):
                _check_path(one)
            elif isinstance(one, int) and "seed" not in field.name:  # seeds have their own checks
                _check_number(one, field.name)


def _check_path(path: Path) -> None:
    """Check that a path is UTF-8, which safetensors and HTML pages need.

    Otherwise the weights of a run would look damaged.
    """
    check(_is_text(str(path)), f"{str(path)!a} is no UTF-8 text; rename the file or folder")


def _check_number(value: int, name: str) -> None:
    """Check that a count fits into int64, as the sizes of tensors and arrays must."""
    option = name.replace("_", "-")
    check(value < 2**63, f"--{option} {value} does not fit into 64 bits; give a smaller number")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def one_line(box: str) -> str:
    """Extract the text inside a boxed message as one line; `;` separates its sections."""
    text = ""
    for row in box.splitlines()[1:-1]:  # between the upper and the lower edge
        row = row.strip(" \u2502|")  # the sides are | on terminals without UTF-8
        text += ";" if re.fullmatch(r"[\u2500-]+", row) else f" {row}"
    return re.sub(r"[.:]?;", ";", re.sub(r"\s+", " ", text)).strip(" ;.")
