"""Small JSON records on disk, read back with every field checked."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter, ValidationError

from acmoe.errors import UserError, check

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


@cache  # building a validator takes longer than using it
def _validator(kind: type[R]) -> TypeAdapter[R]:
    return TypeAdapter(kind)


def write_record(path: Path, record: "DataclassInstance") -> None:
    """Write a dataclass as indented JSON; equal records are equal files."""
    path.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def read_record(path: Path, kind: type[R], *, fix: str) -> R:
    """Read what `write_record` wrote; `fix` ends the one line of error."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {fix}") from error
    try:
        record: R = _validator(kind).validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path} is damaged: {where}: {first['msg']}; {fix}") from error
    return record


def check_record(path: Path, found: tuple[str, int], expected: tuple[str, int], fix: str) -> None:
    """Refuse a record of another format or version."""
    check(
        found == expected,
        f"{path} is {found[0]} version {found[1]}, expected {expected[0]} version {expected[1]};"
        f" {fix}",
    )
