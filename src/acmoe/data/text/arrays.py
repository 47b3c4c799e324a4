"""Token ids on disk: one-dimensional .npy files, written in pieces and read memory-mapped."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from acmoe.data.sources import sha256_of
from acmoe.errors import UserError, check

# Token ids as stored: uint8, uint16 or int32 by the size of the vocabulary.
Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """What a stored array must be: file name, size in bytes, SHA-256, token count and type."""

    file: str
    bytes: int
    sha256: str
    tokens: int
    dtype: str


def smallest_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """The narrowest of uint8, uint16 and int32 that holds every token id."""
    if vocabulary_size <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16) if vocabulary_size <= 1 << 16 else np.dtype(np.int32)


def write_array(path: Path, dtype: np.dtype[Any], length: int, pieces: Iterable[Tokens]) -> None:
    """Write `length` token ids, given in pieces, as a .npy file of `dtype`."""
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    written = 0
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, header)
        for piece in pieces:
            file.write(piece.astype(dtype).tobytes())
            written += len(piece)
    assert written == length, f"{path}: wrote {written} token ids of {length}"


def describe_array(path: Path, tokens: int, dtype: np.dtype[Any]) -> ArrayRecord:
    """The record by which `open_array` will know the file again."""
    return ArrayRecord(
        file=path.name,
        bytes=path.stat().st_size,
        sha256=sha256_of(path),
        tokens=tokens,
        dtype=dtype.name,
    )


def check_array(folder: Path, record: ArrayRecord, *, fix: str, verify: bool = False) -> None:
    """Refuse a file that is not the recorded one: by its size, or with `verify` by its SHA-256."""
    path = folder / record.file
    check(path.is_file(), f"{path} is missing; {fix}")
    size = path.stat().st_size
    check(
        size == record.bytes,
        f"{path} has {size:,} bytes, expected {record.bytes:,} as recorded in the manifest; {fix}",
    )
    check(
        not verify or sha256_of(path) == record.sha256,
        f"{path} was changed after it was written: its SHA-256 is not the recorded one; {fix}",
    )


def open_array(folder: Path, record: ArrayRecord, *, fix: str, verify: bool = False) -> Tokens:
    """The token ids of a checked file, memory-mapped and read-only."""
    check_array(folder, record, fix=fix, verify=verify)
    path = folder / record.file
    try:
        array: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is no array of token ids ({error}); {fix}") from error
    check(
        array.shape == (record.tokens,) and array.dtype.name == record.dtype,
        f"{path} holds {array.dtype.name} of shape {array.shape}, expected {record.tokens:,}"
        f" {record.dtype}; {fix}",
    )
    return array
