"""Atomic creation of folders: a folder is complete or absent, even if its builder is killed.

A folder is built under a hidden name next to its final path, synced to disk, and moved to the final
path by one rename. If a build is killed, its remains have the hidden name; the next build removes
them.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from acmoe.errors import UserError
from acmoe.storage.atomic import sync

if sys.platform != "win32":
    import fcntl


def build_folder(out: Path, build: Callable[[Path], None], done: Callable[[], bool]) -> bool:
    """Let `build` fill an empty folder, then move that folder to `out`.

    Returns False, without a build, where `done()` is true already. If two processes build
    the same folder, the second waits for the first and then finds it done.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        while not done():
            with _locked(_partial(out)) as held:
                if held and not done():
                    _build(out, build)
                    return True
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror or error}; make room or choose another folder"
        ) from error
    return False


def _partial(out: Path) -> Path:
    """Return the hidden path under which `out` is built."""
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
    except BaseException:  # includes KeyboardInterrupt: leave nothing behind
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if out.exists():
        os.replace(out, old)
    os.replace(partial, out)
    sync(out.parent)
    _remove(old)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold an exclusive `flock` on a folder; the kernel releases it if the process is killed.

    Yields False if the folder was moved or removed during the wait; the caller must try again.
    """
    folder.mkdir(exist_ok=True)
    if sys.platform == "win32":  # no flock: only one process may build a folder at a time
        yield True
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder.exists() and os.path.samestat(os.fstat(handle), folder.stat())
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
