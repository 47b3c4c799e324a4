"""Replace files atomically: after a crash at any moment a file has its old or its new content."""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from acmoe.errors import UserError

_ON_WINDOWS = os.name == "nt"
DRAFT = ".draft"  # a draft of config.json is called .config.json.draft


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file; on failure the old content stays and no draft is left."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path of a draft, which replaces the file unless an error leaves `with`."""
    if not path.name:  # such as . and /
        raise UserError(f"cannot write {path}: it is a folder; name a file in it")
    draft = path.with_name(f".{path.name}{DRAFT}")
    with report_write_errors(path):
        try:
            yield draft
            sync(draft)
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        sync(path.parent)


@contextlib.contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a `UserError` that names the path and the fix.

    The safetensors library reports a full disk by an error class of its own.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot write {path}: {reason}; make room or choose another folder, then give the "
            "same command again"
        ) from error


def damaged_name(path: Path) -> Path:
    """Return the first free name beside a damaged file or folder: NAME.damaged-1, -2, ..."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk, so that they survive a power cut.

    Windows cannot open a folder, and flushes a file only for those that may write to it.
    """
    if _ON_WINDOWS and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if _ON_WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, read in chunks."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
