"""What a benchmark is doing now: compiling a rival can take a minute without a sign of life."""

from collections.abc import Callable

Say = Callable[[str], None]


def silent(text: str) -> None:
    """For callers that want the report alone."""
