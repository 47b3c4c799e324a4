"""The corpus that needs no download: the source text of Python's own standard library."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from acmoe.data.progress import Progress
from acmoe.data.sources import SourceRecord
from acmoe.errors import UserError, check

# Not library code, or not the same on two installations of one Python version.
LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "idle_test", "turtledemo", "lib2to3", "ensurepip", "__pycache__"}
    | {"site-packages", "dist-packages"}
)
BUILD_FILES = ("_sysconfigdata", "_sysconfig_vars")  # generated for one machine
FEWEST = 100_000  # bytes; a whole standard library has more than ten million


@dataclass(frozen=True)
class SourceFile:
    """A library file; `order` is a hash of its name, by which the files are shuffled."""

    name: str
    order: str
    data: bytes


def read_stdlib(root: Path | None, progress: Progress) -> list[SourceFile]:
    """Every library file under `root`, the running interpreter's by default, shuffled by name.

    The order is the same for a Python version everywhere.
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
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        progress("standard library", done, len(paths))
    total = sum(len(file.data) for file in files)
    check(
        total >= FEWEST,
        f"only {total:,} bytes of library source in {root} (a stripped installation?); {advice}",
    )
    return sorted(files, key=lambda file: file.order)


def _wanted(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    built = parts[-1].startswith(BUILD_FILES) or parts[0].startswith("config-")
    return not built and LEFT_OUT.isdisjoint(parts[:-1])


def stdlib_record(files: list[SourceFile]) -> SourceRecord:
    """One checksum over every name and text."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{len(file.data)}\0".encode() + file.data)
    size = sum(len(file.data) for file in files)
    return SourceRecord(
        split="all", file="Python standard library", bytes=size, sha256=digest.hexdigest()
    )


def stdlib_texts(files: list[SourceFile], limit: int | None) -> dict[str, bytes]:
    """Each split's files end to end: whole files, as near to 90 / 5 / 5 of the bytes as they cut.

    With a `limit`, that many bytes in all: each split's text is cut short to its share.
    """
    total, before = sum(len(file.data) for file in files), 0
    parts: dict[str, list[bytes]] = {"train": [], "valid": [], "test": []}
    for file in files:
        middle = before + len(file.data) / 2  # where most of a file lies, there it goes
        split = "train" if middle < 0.90 * total else "valid" if middle < 0.95 * total else "test"
        parts[split].append(file.data)
        before += len(file.data)
    texts = {split: b"".join(data) for split, data in parts.items()}
    for split, text in texts.items():
        check(len(text) > 0, f"no file of the standard library fell into the {split} split")
    if limit is None:
        return texts
    share = {"train": limit * 9 // 10, "valid": limit // 20, "test": limit // 20}
    return {split: text[: share[split]] for split, text in texts.items()}
