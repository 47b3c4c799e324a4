"""Source files, plain or compressed, as chunks or lines; every way they can be broken explained."""

import gzip
import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from acmoe.errors import UserError, check

CHUNK = 1 << 20  # bytes read at a time
MAX_LINE = 1 << 26  # bytes; a longer line is no text, and would not fit the idea of streaming
SUFFIXES = ("", ".xz", ".gz")


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """What a corpus was made from: the file's name, its size in bytes and its SHA-256."""

    split: str
    file: str
    bytes: int
    sha256: str


def sha256_of(path: Path) -> str:
    """SHA-256 of a file as it lies on disk, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_source(split: str, path: Path) -> SourceRecord:
    """Size and checksum of one source file."""
    check(path.is_file(), f"{path} is not a file")
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return SourceRecord(split=split, file=path.name, bytes=path.stat().st_size, sha256=digest)


def _decompressed(path: Path, file: BinaryIO) -> BinaryIO:
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(file))
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(file))
    return file


def read_chunks(
    path: Path, report: Callable[[int, int], None] | None = None, size: int = CHUNK
) -> Iterator[bytes]:
    """The decompressed bytes of a file; `report` gets the compressed bytes read and their total."""
    offset = 0
    try:
        with path.open("rb") as raw:
            total = path.stat().st_size
            text = _decompressed(path, raw)
            while chunk := text.read(size):
                offset += len(chunk)
                yield chunk
                if report:
                    report(raw.tell(), total)
    except EOFError as error:
        raise UserError(
            f"{path} is truncated: its compressed stream ends after {offset:,} bytes of text;"
            " fetch the file again"
        ) from error
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path} is corrupt after {offset:,} bytes of text ({error}); fetch the file again"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    check(offset > 0, f"{path} is empty; expected text")


def read_lines(
    path: Path, report: Callable[[int, int], None] | None = None
) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1, without the newline; a missing last newline is fine."""
    number, rest = 0, b""
    for chunk in read_chunks(path, report):
        pieces = (rest + chunk).split(b"\n")
        rest = pieces.pop()
        check(
            len(rest) <= MAX_LINE,
            f"{path}: line {number + len(pieces) + 1} is longer than {MAX_LINE:,} bytes;"
            " expected text with one paragraph a line",
        )
        for piece in pieces:
            number += 1
            yield number, _decoded(path, number, piece)
    if rest:
        yield number + 1, _decoded(path, number + 1, rest)


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: line {number}, byte {error.start + 1} (0x{line[error.start]:02x}) is not"
            " UTF-8; expected UTF-8 text"
        ) from error


def find_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The first of `names` that lies in the folder, plain before .xz before .gz."""
    for name in names:
        for suffix in SUFFIXES:
            if (folder / (name + suffix)).is_file():
                return folder / (name + suffix)
    return None
