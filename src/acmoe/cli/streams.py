"""Show warnings of commands in one line, and end quietly if the reader of a pipe has gone."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from rich.console import Console

_LAUNCHER_SETS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # in the environment


def is_first_of_machine() -> bool:
    """Return True in the first process of each machine that torchrun starts, and without torchrun.

    A LOCAL_RANK alone, left in the environment by something else, makes no process one of several.
    """
    launched = all(os.environ.get(name) for name in _LAUNCHER_SETS)
    return not launched or os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def plain_output() -> Iterator[None]:
    """Inside `with`, print a warning as one line, and handle pipes whose reader is gone.

    Standard output then raises BrokenPipeError, and standard error drops its text.
    """
    before = Console.on_broken_pipe, warnings.formatwarning, sys.stderr
    Console.on_broken_pipe = _on_broken_pipe  # type: ignore[method-assign]
    warnings.formatwarning = _one_line
    sys.stderr = cast(TextIO, _Notes(sys.stderr))
    try:
        yield
    finally:
        Console.on_broken_pipe, warnings.formatwarning, sys.stderr = before  # type: ignore[method-assign]


class _Notes:
    """Standard error, which has progress and notes alone: it drops them if its reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            drop_output(self._stream.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            drop_output(self._stream.fileno())


def drop_output(descriptor: int) -> None:
    """Send what is written to a file descriptor to /dev/null, also what Python holds for it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _on_broken_pipe(self: Console) -> None:
    """Raise: standard output has no reader. rich itself would end the process with 1."""
    raise BrokenPipeError


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: object = None
) -> str:
    """Return a warning as one line, without the place in the code.

    Of the processes that torchrun starts, the first of each machine prints it.
    """
    line_of = f"acmoe: warning: {' '.join(str(message).split())}\n"
    return line_of if is_first_of_machine() else ""
