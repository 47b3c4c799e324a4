"""`UserError`, raised for mistakes that a user can correct, and the checks that raise it."""

import difflib
import math
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the user's input. The message is one line that names the value and the fix.

    The command line prints the message and exits with 2; library callers catch a ValueError. Line
    breaks and other control characters, which come from names and values in the message, are
    escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))


class NonFiniteError(UserError):
    """A model gives NaN or infinity, so that nothing can be scored or generated with it."""


def check(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def check_choice(value: object, choices: tuple[str, ...], name: str) -> None:
    """Check that the setting called `name` is one of `choices`."""
    check(value in choices, f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")


def check_distinct(values: tuple[object, ...], name: str) -> None:
    """Check that no value of the setting called `name` is given twice."""
    twice = next((one for one in values if values.count(one) > 1), None)
    check(twice is None, f"{name} holds {twice!r} twice; give it once")


def check_positive(value: float, name: str) -> None:
    """Check that the setting called `name` is positive and finite."""
    check(is_finite(value) and value > 0, f"{name}={value}; it must be positive and finite")


def check_not_negative(value: float, name: str) -> None:
    """Check that the setting called `name` is finite and not negative."""
    check(is_finite(value) and value >= 0, f"{name}={value}; it must be 0 or more, and finite")


def check_seed(seed: int) -> None:
    """Check that torch's generators take the seed."""
    check(hasattr(seed, "__index__"), f"seed={seed!r}; it must be a whole number")
    check(-(2**63) <= seed < 2**64, f"seed={seed}; it must lie between -2**63 and 2**64 - 1")


def suggest(wrong: str, known: Iterable[str], *, most: int = 3) -> str:
    """Return the end of an error about an unknown name: the names that are close to it, or all."""
    names = list(known)
    near = difflib.get_close_matches(wrong, names, n=most)
    return f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(names)}"


def is_finite(value: float) -> bool:
    """Return False for NaN, infinity, and integers that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where the message is empty."""
    return (str(error) or type(error).__name__).splitlines()[0]


def typed_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message that is not blank."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
