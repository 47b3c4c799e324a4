"""A corpus that needs no download: the source code of Python's standard library."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from acmoe.data.progress import Progress
from acmoe.data.sources import SourceRecord
from acmoe.errors import UserError, check

# Folders that hold no library code, or that differ between installations of one Python version.
EXCLUDED = frozenset(
    {"test", "tests", "idlelib", "idle_test", "turtledemo", "lib2to3", "ensurepip", "__pycache__"}
    | {"site-packages", "dist-packages"}
)
BUILD_FILES = ("_sysconfigdata", "_sysconfig_vars")  # generated for one machine
MIN_BYTES = 100_000  # a complete standard library has more than ten million


@dataclass(frozen=True)
class SourceFile:
    """A library file; `order` is a hash of its name, by which files are sorted to shuffle them."""

    name: str
    order: str
    data: bytes


def read_stdlib(root: Path | None, progress: Progress) -> list[SourceFile]:
    """Read the library files under `root`, by default those of the running interpreter.

    The files are shuffled by a hash of their names, so that the order is the same on all machines
    with the same Python version.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    advice = "prepare another text: `acmoe data prepare bytes` with a file of yours"
    check(root.is_dir(), f"no source of the standard library in {root} (zipped?); {advice}")
    paths = sorted(path for path in root.rglob("*.py") if path.is_file() and _wanted(path, root))
    files = []
    for done, path in enumerate(paths, start=1):
        name = path.relative_to(root).as_posix()
        order = hashlib.sha256(name.encode()).hexdigest()
        try:
            files.append(SourceFile(name, order, path.read_bytes()))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; {advice}") from error
        progress("standard library", done, len(paths))
    total = sum(len(file.data) for file in files)
    check(
        total >= MIN_BYTES,
        f"only {total:,} bytes of library source in {root} (a stripped installation?); {advice}",
    )
    return sorted(files, key=lambda file: file.order)


def _wanted(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    built = parts[-1].startswith(BUILD_FILES) or parts[0].startswith("config-")
    return not built and EXCLUDED.isdisjoint(parts[:-1])


def stdlib_record(files: list[SourceFile]) -> SourceRecord:
    """Return one record for all files; its checksum covers every name and content."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{len(file.data)}\0".encode() + file.data)
    size = sum(len(file.data) for file in files)
    return SourceRecord(
        split="all", file="Python standard library", bytes=size, sha256=digest.hexdigest()
    )


def stdlib_texts(files: list[SourceFile], limit: int | None) -> dict[str, bytes]:
    """Concatenate the files of each split: whole files, close to 90 : 5 : 5 by bytes.

    With a `limit`, each split's text is truncated to its share of that many bytes.
    """
    total, before = sum(len(file.data) for file in files), 0
    parts: dict[str, list[bytes]] = {"train": [], "valid": [], "test": []}
    for file in files:
        middle = before + len(file.data) / 2  # a file belongs to the split that holds its middle
        split = "train" if middle < 0.90 * total else "valid" if middle < 0.95 * total else "test"
        parts[split].append(file.data)
        before += len(file.data)
    texts = {split: b"".join(data) for split, data in parts.items()}
    for split, text in texts.items():
        check(
            len(text) > 0,
            f"no file of the standard library fell into the {split} split: this Python has too few "
            "of them; use another",
        )
    if limit is None:
        return texts
    share = {"train": limit * 9 // 10, "valid": limit // 20, "test": limit // 20}
    return {split: text[: share[split]] for split, text in texts.items()}
