"""Locks of the operating system on files: it frees them when a process dies."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from acmoe.errors import UserError, check
from acmoe.storage.atomic import report_write_errors

if sys.platform != "win32":
    import fcntl


@contextmanager
def locked(path: Path, *, in_use: str) -> Iterator[None]:
    """Hold the lock file `path`, which contains our process id.

    in_use: the error message if another process holds the lock; {owner} stands for its process id.
    A symbolic link is refused: writing the process id would overwrite the file behind it.
    """
    handle = open_regular(path)
    try:
        owner = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
        take_lock(handle, in_use.format(owner=owner))
        with report_write_errors(path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def take_lock(handle: int, in_use: str) -> None:
    """Lock an open file without waiting; raise `UserError(in_use)` if another process holds it."""
    if sys.platform == "win32":  # Windows has no flock: there the user must take care
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(in_use) from None


def open_regular(path: Path, *, append: bool = False) -> int:
    """Open or create a regular file for reading and writing; refuse links, pipes and devices."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    check_no_link(path)
    try:
        handle = os.open(path, flags | (os.O_APPEND if append else 0), 0o644)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another folder") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path} is no regular file; remove it")
    return handle


def check_no_link(path: Path) -> None:
    """Raise a UserError for a symbolic link, which `open_regular` would not open."""
    check(not path.is_symlink(), f"{path} is a symbolic link; replace it by a file, or remove it")
