"""Report an option that is given and not read."""

from collections.abc import Collection
from dataclasses import fields
from typing import Any, get_type_hints

import tyro

from acmoe.errors import check


def check_read(command: Any, read: Collection[str], when: str) -> None:
    """Raise a UserError if an option is given that is not one of `read`.

    `when` says what the options are read for, such as "with --summarise". A field that has its
    default counts as not given.
    """
    hints = get_type_hints(type(command), include_extras=True)
    for field in fields(command):
        value = getattr(command, field.name)
        positional = tyro.conf.Positional in getattr(hints[field.name], "__metadata__", ())
        option = "" if positional else f"--{field.name.replace('_', '-')} "
        check(
            field.name in read or value == field.default,
            f"{option}{_words(value)}".strip() + f" has no effect {when}; leave it out",
        )


def _words(value: object) -> str:
    """Return a value as on the command line; a flag has none."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if isinstance(value, bool) else str(value)
