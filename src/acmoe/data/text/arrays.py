"""Token ids on disk: one-dimensional .npy files, written in chunks and read memory-mapped."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from acmoe.data.text.records import check_sha256, check_size
from acmoe.errors import UserError, check, first_line
from acmoe.storage.atomic import sha256_of

# Token ids as stored: uint8, uint16 or int32 by the size of the vocabulary.
Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """The recorded properties of a stored array, by which the file is checked when it is opened."""

    file: str
    bytes: int
    sha256: str
    tokens: int
    dtype: str


def smallest_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Return the narrowest of uint8, uint16 and int32 that holds every token id."""
    if vocabulary_size <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16) if vocabulary_size <= 1 << 16 else np.dtype(np.int32)


def write_array(path: Path, dtype: np.dtype[Any], length: int, chunks: Iterable[Tokens]) -> None:
    """Write `length` token ids, given in chunks, as a .npy file of `dtype`."""
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    written = 0
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, header)
        for chunk in chunks:
            file.write(chunk.astype(dtype).tobytes())
            written += len(chunk)
    assert written == length, f"{path}: wrote {written} token ids of {length}"


def describe_array(path: Path, tokens: int, dtype: np.dtype[Any]) -> ArrayRecord:
    """Return the record that `open_array` checks the file against."""
    return ArrayRecord(
        file=path.name,
        bytes=path.stat().st_size,
        sha256=sha256_of(path),
        tokens=tokens,
        dtype=dtype.name,
    )


def check_array(folder: Path, record: ArrayRecord, *, fix: str, verify: bool = False) -> None:
    """Check that a file has its recorded size and, with `verify`, its recorded SHA-256."""
    path = folder / record.file
    check(
        Path(record.file).name == record.file and not path.is_symlink(),
        f"file={record.file!r} in the manifest is not a file of {folder}; {fix}",
    )
    check_size(path, record.bytes, fix)
    if verify:
        check_sha256(path, record.sha256, fix)


def open_array(folder: Path, record: ArrayRecord, *, fix: str, verify: bool = False) -> Tokens:
    """Check a file and return its token ids, memory-mapped and read-only."""
    check_array(folder, record, fix=fix, verify=verify)
    path = folder / record.file
    try:
        array: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy's parser of a damaged header raises errors of many kinds
        raise UserError(f"{path} is no array of token ids ({first_line(error)}); {fix}") from error
    check(
        array.shape == (record.tokens,) and array.dtype.name == record.dtype,
        f"{path} holds {array.dtype.name} of shape {array.shape}, expected {record.tokens:,}"
        f" {record.dtype}; {fix}",
    )
    return array
