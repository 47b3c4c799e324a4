"""Fail, cut short or kill at the k-th file operation of a process, as SQLite's tests do.

A child process replaces the functions that change files by counting ones. At the chosen call it
dies (`kill`), gets "no space left" (`full`), or writes half of the data first (`torn`, then dies).
"""

import errno
import os
import pathlib
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from torch.distributed.checkpoint.filesystem import FileSystem

import acmoe.models.checkpoint
import acmoe.train.checkpoint
from acmoe.errors import UserError
from cpu import settle_cpu

Fault = Literal["count", "kill", "full", "torn"]

# Functions that change files. Python's own modules look them up in `os` at each call.
OPERATIONS: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("replace", "rename", "fsync", "write", "pwrite", "ftruncate")),
    *((os, name) for name in ("truncate", "unlink", "rmdir", "mkdir")),
    (pathlib.Path, "write_text"),
    (pathlib.Path, "write_bytes"),
    (acmoe.models.checkpoint, "save_file"),
    (acmoe.train.checkpoint, "save_file"),
    (FileSystem, "create_stream"),  # of the files of several processes
)
WRITES = {"write", "pwrite", "write_text", "write_bytes"}


@dataclass
class Injector:
    """Counts file operations and fails at number `at`, from 1."""

    fault: Fault
    at: int = 0
    count: int = 0

    def install(self) -> None:
        """Replace the functions in this process, for good."""
        for owner, name in OPERATIONS:
            setattr(owner, name, self._wrapped(getattr(owner, name), name))

    def _wrapped(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count != self.at:
                return real(*arguments, **options)
            if self.fault == "torn" and name in WRITES:
                target, data, *rest = arguments
                real(target, data[: len(data) // 2], *rest, **options)
            if self.fault in ("kill", "torn"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return operation


def run_with_fault(pipe: Connection, task: Callable[[], None], fault: Fault, at: int) -> None:
    """Run a task in this child process with a fault; send its number of operations, or an error."""
    settle_cpu()
    injector = Injector(fault, at)
    injector.install()
    try:
        task()
        pipe.send(("done", injector.count))
    except UserError as error:
        pipe.send(("refused", str(error)))
    except BaseException:
        pipe.send(("traceback", traceback.format_exc()))
