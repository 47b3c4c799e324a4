"""What a command does with warnings, and with a pipe whose reader has gone."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def plain_output() -> Iterator[None]:
    """Inside `with`, a warning is one line, and a closed pipe ends or silences a command."""
    before = Console.on_broken_pipe, warnings.formatwarning
    Console.on_broken_pipe = _on_broken_pipe  # type: ignore[method-assign]
    warnings.formatwarning = _one_line
    try:
        yield
    finally:
        Console.on_broken_pipe, warnings.formatwarning = before  # type: ignore[method-assign]


def drop_output(descriptor: int) -> None:
    """Send what is written to a file descriptor to /dev/null, also what Python holds for it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _on_broken_pipe(self: Console) -> None:
    """Raise if standard output has no reader; rich itself would end the process with 1.

    Standard error has only progress and notes: the command goes on without them, and no work is
    lost.
    """
    if not self.stderr:
        raise BrokenPipeError
    drop_output(sys.stderr.fileno())


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: object = None
) -> str:
    """Return a warning as one line, without the place in the code.

    Of the processes that torchrun starts, the first of each machine prints it.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    return f"acmoe: warning: {' '.join(str(message).split())}\n" if first else ""
