"""Check, before the work begins, that the files in which it will end can be written.

Nothing is created: a command that fails later leaves no empty folder behind.
"""

import os
from pathlib import Path

from acmoe.errors import check
from acmoe.storage.lock import check_no_link


def check_can_fill(folder: Path) -> None:
    """Raise a UserError unless files can be written into the folder, which need not exist yet."""
    _check_folder(folder, f"into {folder}")


def check_can_write(file: Path) -> None:
    """Raise a UserError unless the file can be created or replaced, with the folders above it."""
    check(not os.path.isdir(file), f"{file} is a folder; name a file in it")
    _check_folder(file.parent, str(file))


def check_can_append(file: Path) -> None:
    """Raise a UserError unless the file can be read and written, or created, in its place.

    Lines are added to a file itself: unlike one that is replaced, it may lie in a folder in which
    nobody may create files, and must be writable. Links, pipes and devices are refused
    (`open_regular`).
    """
    check_no_link(file)
    there = file.exists() and not file.is_dir()
    check(file.is_file() or not there, f"{file} is no regular file; remove it")
    if not file.is_file():
        check_can_write(file)
        return
    allowed = os.access(file, os.R_OK | os.W_OK)
    check(allowed, f"cannot write {file}: no permission to read and write it; choose another path")


def _check_folder(folder: Path, what: str) -> None:
    there = _nearest(folder)
    reason = ""
    if not os.path.isdir(there):
        reason = f"{there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        reason = f"no permission in {there}"
    check(not reason, f"cannot write {what}: {reason}; choose another path")


def _nearest(path: Path) -> Path:
    """Return the path itself or the nearest folder or file above it that exists."""
    return next((one for one in (path, *path.parents) if os.path.lexists(one)), Path())
