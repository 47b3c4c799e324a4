"""Read source files, plain or compressed, in chunks or lines, with clear errors for bad files."""

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from acmoe.errors import UserError, check
from acmoe.storage.atomic import sha256_of

CHUNK = 1 << 20  # bytes read at a time
MAX_LINE = 1 << 26  # bytes; a file with longer lines is no text, and could not be streamed
SUFFIXES = ("", ".xz", ".gz")


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """One file that a corpus was made from: its name, its size in bytes and its SHA-256."""

    split: str
    file: str
    bytes: int
    sha256: str


def describe_source(split: str, path: Path) -> SourceRecord:
    """Return the name, size and checksum of one source file."""
    check(path.is_file(), f"{path} is not a file; give the path of one")
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a readable file") from error
    return SourceRecord(split=split, file=path.name, bytes=path.stat().st_size, sha256=digest)


def _decompress(path: Path, file: BinaryIO) -> BinaryIO:
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(file))
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(file))
    return file


def read_chunks(
    path: Path, report: Callable[[int, int], None] | None = None, size: int = CHUNK
) -> Iterator[bytes]:
    """Yield the decompressed content of a file in chunks of `size` bytes.

    `report` is called with the compressed bytes read so far and their total.
    """
    offset = 0
    try:
        with path.open("rb") as raw:
            total = path.stat().st_size
            text = _decompress(path, raw)
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
        reason = error.strerror or error
        raise UserError(f"cannot read {path}: {reason}; give a readable file") from error
    check(offset > 0, f"{path} is empty; give a file of text")


def read_lines(
    path: Path, report: Callable[[int, int], None] | None = None
) -> Iterator[tuple[int, str]]:
    """Yield (number, line) from 1 on, without newlines; the last line may lack its newline."""
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
            yield number, _decode(path, number, piece)
    if rest:
        yield number + 1, _decode(path, number + 1, rest)


def _decode(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: line {number}, byte {error.start + 1} (0x{line[error.start]:02x}) is not"
            " UTF-8; expected UTF-8 text"
        ) from error


def find_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first of `names` that exists in the folder: plain, else .xz, else .gz."""
    for name in names:
        for suffix in SUFFIXES:
            if (folder / (name + suffix)).is_file():
                return folder / (name + suffix)
    return None
