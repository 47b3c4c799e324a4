"""Folders that are either complete or absent, whatever kills the process that builds them.

A folder is built beside its place under a hidden name, synced to disk, and moved into place by one
rename. A leftover of a killed build never has the final name, and the next build clears it.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from acmoe.errors import UserError

if sys.platform != "win32":
    import fcntl


def build_folder(out: Path, build: Callable[[Path], None], done: Callable[[], bool]) -> bool:
    """Let `build` fill a fresh folder and move it to `out`; False where `done()` holds already.

    Two processes that build the same folder take turns; the second finds it done.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        while not done():
            with _locked(_partial(out)) as held:
                if held and not done():
                    _build(out, build)
                    return True
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    return False


def _partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def _build(out: Path, build: Callable[[Path], None]) -> None:
    partial, old = _partial(out), out.with_name(f".{out.name}.old")
    for leftover in partial.iterdir():
        _remove(leftover)
    _remove(old)
    try:
        build(partial)
        for path in sorted(partial.rglob("*")):
            sync(path)
        sync(partial)
    except BaseException:  # an interrupt too: leave nothing behind
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if out.exists():
        os.replace(out, old)
    os.replace(partial, out)
    sync(out.parent)
    _remove(old)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the kernel's lock on a folder; a killed process loses it by itself.

    Yields False when the folder was moved or removed while we waited: the caller looks again.
    """
    folder.mkdir(exist_ok=True)
    if sys.platform == "win32":  # has no such lock: one process at a time may build a folder there
        yield True
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder.exists() and os.path.samestat(os.fstat(handle), folder.stat())
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Make a file, or a folder's list of names, survive a power cut."""
    if path.is_dir() and os.name != "posix":
        return  # only POSIX can sync a directory
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
