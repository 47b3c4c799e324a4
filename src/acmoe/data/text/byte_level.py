"""Byte-level corpora: one file, split 90 : 5 : 5 into training, validation and test text."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from acmoe.data.progress import Progress
from acmoe.data.sources import CHUNK, find_file, read_chunks
from acmoe.data.text.arrays import smallest_dtype, write_array
from acmoe.data.text.vocabulary import ByteVocabulary
from acmoe.errors import check

# Length of the text in bytes -> length of each split in bytes.
Lengths = Callable[[int], dict[str, int]]


def proportional(length: int) -> dict[str, int]:
    """Split a length 90 : 5 : 5. EnWik-8's 100,000,000 bytes give its usual 90M, 5M and 5M."""
    train, valid = length * 9 // 10, length // 20
    return {"train": train, "valid": valid, "test": length - train - valid}


def find_byte_file(source: Path) -> Path:
    """Return the source if it is a file; in a folder, the file enwik8 or else the only file."""
    if source.is_file():
        return source
    check(source.is_dir(), f"{source} does not exist; expected a file or a folder with one")
    if found := find_file(source, ("enwik8",)):
        return found
    files = sorted(path for path in source.iterdir() if path.is_file())
    check(
        len(files) == 1,
        f"{source} holds {len(files)} files, none of them called enwik8; give the path of one file",
    )
    return files[0]


def file_bytes(path: Path, limit: int | None, progress: Progress) -> Iterator[bytes]:
    """Yield the first `limit` bytes of a file (None: all) in chunks."""
    left = limit

    def report(done: int, size: int) -> None:
        progress(path.name, done, size)

    for chunk in read_chunks(path, report):
        yield chunk[:left]
        if left is not None:
            left -= len(chunk)
            if left <= 0:
                return


def write_bytes(
    chunks: Iterable[bytes], folder: Path, *, lengths: Lengths, all_values: bool
) -> tuple[ByteVocabulary, dict[str, int]]:
    """Write each split as `folder`/SPLIT.npy; return the vocabulary and the token counts.

    The vocabulary has all 256 byte values with `all_values`, else only those that occur.
    """
    raw = folder / "text.raw"
    seen = np.zeros(256, dtype=np.bool_)
    with raw.open("wb") as out:
        for chunk in chunks:
            out.write(chunk)
            seen[np.frombuffer(chunk, dtype=np.uint8)] = True
    counts = lengths(raw.stat().st_size)
    for split, length in counts.items():
        check(length >= 2, f"the {split} split holds {length} bytes; expected two or more")
    vocabulary = ByteVocabulary(bytes(range(256) if all_values else np.flatnonzero(seen).tolist()))
    start = 0
    with raw.open("rb") as text:
        for split, length in counts.items():
            text.seek(start)
            ids = (
                vocabulary.lookup[np.frombuffer(text.read(min(CHUNK, length - at)), dtype=np.uint8)]
                for at in range(0, length, CHUNK)
            )
            write_array(folder / f"{split}.npy", smallest_dtype(vocabulary.size), length, ids)
            start += length
    raw.unlink()
    return vocabulary, counts
