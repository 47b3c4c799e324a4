"""Report the progress of a benchmark, since compiling a baseline can take a minute."""

from collections.abc import Callable

Say = Callable[[str], None]


def silent(text: str) -> None:
    """Print nothing."""
