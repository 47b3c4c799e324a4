"""The results of a study: one JSON line for every finished cell.

Each line is written at once and synced. A crash can cut off only the last line; it is dropped when
the file is next opened, and its cell runs again.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from acmoe.errors import UserError

if sys.platform != "win32":
    import fcntl

Record = dict[str, Any]

DONE, FAILED = "done", "failed"


class Results:
    """The records of a results file that is open for writing."""

    def __init__(self, handle: int, records: Sequence[Record]) -> None:
        self._handle = handle
        self.records = list(records)

    def add(self, record: Record) -> None:
        """Write a record, and sync it to disk."""
        os.write(self._handle, _line(record))
        os.fsync(self._handle)
        self.records.append(record)

    def status(self, digest: str) -> str | None:
        """Return how the cell ended in its last run; None where it has not run."""
        found = [record["status"] for record in self.records if record["digest"] == digest]
        return found[-1] if found else None


@contextlib.contextmanager
def open_results(path: Path) -> Iterator[Results]:
    """Lock the file for writing; raise where another process holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    try:
        if sys.platform != "win32":  # Windows has no flock: there the user must take care
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"{path} is in use by another study; wait for it, or choose another --out"
                ) from None
        records, whole = _parse(path)
        os.truncate(handle, whole)
        yield Results(handle, records)
    finally:
        os.close(handle)


def read_results(path: Path) -> list[Record]:
    """Read every complete record; another process may be writing."""
    if not path.is_file():
        raise UserError(f"{path} is missing; run the study first, or give its results with --out")
    return _parse(path)[0]


def latest(records: Sequence[Record]) -> list[Record]:
    """Return the last record of each cell, in the order in which cells first ended."""
    return list({record["digest"]: record for record in records}.values())


def _parse(path: Path) -> tuple[list[Record], int]:
    """Return the complete records, and their length in bytes."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    records = []
    for number, line in enumerate(content[:whole].splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise UserError(
                f"{path}: line {number} is no record ({error}); delete that line, its cell will be "
                "run again"
            ) from error
    return records, whole


def _line(record: Record) -> bytes:
    return (json.dumps(record, sort_keys=True) + "\n").encode()
