"""The results of a study: one JSON line for every finished cell.

Each line is written at once and synced. A crash can cut off only the last line; it is dropped when
the file is next opened, and its cell runs again.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from acmoe.errors import UserError
from acmoe.storage.atomic import report_write_errors
from acmoe.storage.lines import Lines, append_to, read_lines
from acmoe.storage.lock import open_regular, take_lock

Record = dict[str, Any]

DONE, FAILED = "done", "failed"


class Results:
    """The records of a results file that is open for writing."""

    def __init__(self, handle: int, records: Sequence[Record], path: Path) -> None:
        self._handle, self._path = handle, path
        self.records = list(records)

    def add(self, record: Record) -> None:
        """Write a record, and sync it to disk."""
        append_to(self._handle, record, self._path)
        with report_write_errors(self._path):
            os.fsync(self._handle)
        self.records.append(record)

    def status(self, digest: str) -> str | None:
        """Return how the cell ended in its last run; None where it has not run."""
        found = [record["status"] for record in self.records if record["digest"] == digest]
        return found[-1] if found else None


@contextlib.contextmanager
def open_results(path: Path) -> Iterator[Results]:
    """Lock the file for writing; raise where another process holds it."""
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    handle = open_regular(path, append=True)
    try:
        take_lock(
            handle, f"{path} is in use by another study; wait for it, or choose another --out"
        )
        lines = _parse(path)
        with report_write_errors(path):
            os.ftruncate(handle, lines.size)
        yield Results(handle, lines.records, path)
    finally:
        os.close(handle)


def read_results(path: Path) -> list[Record]:
    """Read every complete record; another process may be writing."""
    if not path.is_file():
        raise UserError(
            f"{path} is missing; run the study first, or give its results with --out or --published"
        )
    return _parse(path).records


def latest(records: Sequence[Record]) -> list[Record]:
    """Return the last record of each cell, in the order in which cells first ended."""
    return list({record["digest"]: record for record in records}.values())


def _parse(path: Path) -> Lines:
    """Read the records; raise where a line is damaged, whose cell would be missing unnoticed."""
    lines = read_lines(path)
    strange = [number for number, one in enumerate(lines.records, start=1) if not _is_record(one)]
    if wrong := lines.damaged or strange:  # without damaged lines, records are counted as lines
        raise UserError(
            f"{path}: line {wrong[0]} is no record, or was changed; delete that line, its cell "
            "will be run again"
        )
    return lines


def _is_record(record: Record) -> bool:
    """Return True for a record that names its cell and how the cell ended."""
    return all(isinstance(record.get(key), str) for key in ("digest", "status"))
