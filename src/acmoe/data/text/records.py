"""JSON records on disk, validated when they are read, and checks of the files they describe."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter, ValidationError

from acmoe.errors import UserError, check
from acmoe.storage.atomic import sha256_of
from acmoe.storage.sealed import SEAL, read_sealed, seal_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


@cache  # building a validator takes longer than using it
def _validator(kind: type[R]) -> TypeAdapter[R]:
    return TypeAdapter(kind)


def write_record(path: Path, record: "DataclassInstance") -> None:
    """Write a dataclass as indented JSON with a checksum; equal records give equal files."""
    content = asdict(record)
    text = json.dumps({**content, SEAL: seal_of(content)}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def read_record(path: Path, kind: type[R], *, fix: str) -> R:
    """Read and validate a record of class `kind`; `fix` ends the error message."""
    content = read_sealed(path, fix=fix)  # version 0.1 wrote no checksum
    try:
        record: R = _validator(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path} is damaged: {where}: {first['msg']}; {fix}") from error
    return record


def check_record(path: Path, found: tuple[str, int], expected: tuple[str, int], fix: str) -> None:
    """Check the (format, version) of a record."""
    check(
        found == expected,
        f"{path} is {found[0]} version {found[1]}, expected {expected[0]} version {expected[1]};"
        f" {fix}",
    )


def check_size(path: Path, size: int, fix: str) -> None:
    """Check that a file exists and has its recorded size in bytes."""
    check(path.is_file(), f"{path} is missing; {fix}")
    found = path.stat().st_size
    check(
        found == size,
        f"{path} has {found:,} bytes, expected {size:,} as recorded in the manifest; {fix}",
    )


def check_sha256(path: Path, sha256: str, fix: str) -> None:
    """Check that a file has its recorded SHA-256."""
    check(
        sha256_of(path) == sha256,
        f"{path} was changed after it was written: its SHA-256 is not the recorded one; {fix}",
    )
