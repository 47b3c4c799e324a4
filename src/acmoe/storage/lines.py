"""Append-only logs of JSON records, one per line, each with a checksum.

A line is `{..., "crc32": "0123abcd"}`, the CRC-32 of the line without that field. A crash or a full
disk can cut off only the last line. Version 0.1 wrote lines without checksums; they are accepted
before the first line that has one.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acmoe.storage.atomic import report_write_errors
from acmoe.storage.strict_json import finite_or_null

Record = dict[str, Any]

_CHECKSUM = re.compile(rb', "crc32": "([0-9a-f]{8})"\}$')
# A checksum field with one changed character: a damaged line, not one of version 0.1.
_ALMOST = re.compile(rb', "[^"\\]{4,6}": "[^"\\]{7,9}"\}$')


@dataclass(frozen=True, kw_only=True)
class Lines:
    """The records of a log, and the lines that could not be read."""

    records: list[Record]
    damaged: list[int]  # line numbers, from 1
    cut_off: bool  # True: the last line has no line feed, as after a crash
    size: int  # bytes up to the end of the last whole line

    def complaint(self, path: Path) -> str | None:
        """Return one line that says what could not be read, or None."""
        found = []
        if self.damaged:
            numbers = ", ".join(map(str, self.damaged[:5])) + ", ..." * (len(self.damaged) > 5)
            found.append(f"{len(self.damaged)} damaged (line {numbers})")
        if self.cut_off:
            found.append("the last one incomplete")
        return f"{path}: records left out: {' and '.join(found)}" if found else None


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return the line of a record; NaN and infinity, which JSON lacks, become null."""
    body = json.dumps(finite_or_null(record), allow_nan=False).encode()
    checksum = f', "crc32": "{zlib.crc32(body):08x}"}}\n'
    return body[:-1] + checksum.encode()


def parse_lines(content: bytes) -> Lines:
    """Read every whole line; a damaged one is left out and counted."""
    *whole, rest = content.split(b"\n")
    records, damaged, checked = [], [], False
    for number, line in enumerate(whole, start=1):
        record, has_checksum = _parse(line, must_have_checksum=checked)
        checked |= has_checksum
        if record is None:
            damaged.append(number)
        else:
            records.append(record)
    return Lines(
        records=records, damaged=damaged, cut_off=bool(rest), size=len(content) - len(rest)
    )


def read_lines(path: Path) -> Lines:
    """Read the log at `path`; a missing file has no records."""
    return parse_lines(path.read_bytes() if path.is_file() else b"")


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record. Where it cannot be written whole, nothing of it stays in the file."""
    with report_write_errors(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        append_to(handle, record, path)
    finally:
        os.close(handle)


def append_to(handle: int, record: Mapping[str, Any], path: Path) -> None:
    """Append a record to an open file; `path` names it in errors."""
    before, rest = os.fstat(handle).st_size, line_of(record)
    with report_write_errors(path):
        try:
            while rest:  # a nearly full disk takes a part of the bytes, and fails next time
                rest = rest[os.write(handle, rest) :]
        except BaseException:
            os.ftruncate(handle, before)
            raise


def _parse(line: bytes, *, must_have_checksum: bool) -> tuple[Record | None, bool]:
    """Return the record, or None for a damaged line, and whether the line has a checksum."""
    match = _CHECKSUM.search(line)
    body = line[: match.start()] + b"}" if match else line
    if match and int(match[1], 16) != zlib.crc32(body):
        return None, True
    if not match and (must_have_checksum or _ALMOST.search(line)):
        return None, False
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        return None, bool(match)
    return (record if isinstance(record, dict) else None), bool(match)
