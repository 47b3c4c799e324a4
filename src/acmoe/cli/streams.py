"""What a command does with a pipe whose reader has gone."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def plain_output() -> Iterator[None]:
    """Inside `with`, a closed pipe ends or silences a command."""
    before = Console.on_broken_pipe
    Console.on_broken_pipe = _on_broken_pipe  # type: ignore[method-assign]
    try:
        yield
    finally:
        Console.on_broken_pipe = before  # type: ignore[method-assign]


def drop_output(descriptor: int) -> None:
    """Send what is written to a file descriptor to /dev/null, also what Python holds for it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _on_broken_pipe(console: Console) -> None:
    """Raise if standard output has no reader; rich itself would end the process with 1.

    Standard error has only progress and notes: the command goes on without them, and no work is
    lost.
    """
    if not console.stderr:
        raise BrokenPipeError
    drop_output(sys.stderr.fileno())
