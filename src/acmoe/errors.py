"""The one exception for what a user can put right, and the checks that raise it."""

import math


class UserError(ValueError):
    """A mistake in what was asked: the message is one line with the value and the fix.

    The command line prints it and exits with 2; a library caller catches it as a ValueError.
    """


def check(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def check_choice(value: object, choices: tuple[str, ...], name: str) -> None:
    check(value in choices, f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")


def check_positive(value: float, name: str) -> None:
    check(math.isfinite(value) and value > 0, f"{name}={value}; it must be positive and finite")


def check_not_negative(value: float, name: str) -> None:
    check(math.isfinite(value) and value >= 0, f"{name}={value}; it must be 0 or more, and finite")
