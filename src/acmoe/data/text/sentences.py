"""Sentence classification data: SST-2, SST-5 and Banking-77, read from local files."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from acmoe.data.sources import SourceRecord, find_file, read_chunks, read_lines
from acmoe.data.text.banking77 import CATEGORIES
from acmoe.data.text.records import check_record, check_size, read_record, write_record
from acmoe.errors import UserError, check
from acmoe.storage.atomic import sha256_of

FORMAT, VERSION = "acmoe-sentences", 1
MANIFEST = "manifest.json"


class Sentence(NamedTuple):
    """A text and the index of its class in the task's `classes`."""

    text: str
    label: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """The file format of a task; `classes` lists the labels in order of class id."""

    name: str
    classes: tuple[str, ...]
    extension: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


TASKS = {
    "sst2": Task(
        name="sst2",
        classes=("0", "1"),
        extension="tsv",
        required=("train", "dev"),
        optional=("test",),  # optional since GLUE publishes it without labels
    ),
    "sst5": Task(
        name="sst5",
        classes=("0", "1", "2", "3", "4"),
        extension="tsv",
        required=("train", "dev", "test"),
    ),
    "banking77": Task(
        name="banking77", classes=CATEGORIES, extension="csv", required=("train", "test")
    ),
}


@dataclass(frozen=True, kw_only=True)
class SplitRecord:
    """One prepared file: its rows, its size in bytes and its SHA-256."""

    file: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SentenceManifest:
    """The content of a prepared folder of sentences, and its source files."""

    name: str
    splits: dict[str, SplitRecord]
    sources: list[SourceRecord]
    format: str = FORMAT
    version: int = VERSION


def task_of(name: str) -> Task:
    """Return the task of that name."""
    check(name in TASKS, f"task {name!r} is not known; choose one of {', '.join(TASKS)}")
    return TASKS[name]


def find_sentence_files(task: Task, folder: Path) -> dict[str, Path]:
    """Find the file of each split in a folder; raise if a required split is missing."""
    check(folder.is_dir(), f"{folder} is not a folder; expected one with the files of {task.name}")
    files = {}
    for split in (*task.required, *task.optional):
        name = f"{split}.{task.extension}"
        if found := find_file(folder, (name,)):
            files[split] = found
        check(
            split in files or split in task.optional,
            f"{folder} has no {name}, plain, .xz or .gz; {task.name} needs it",
        )
    return files


def has_sentences(name: str, folder: Path) -> bool:
    """Return True where the folder was prepared, or has a file of the task's training split."""
    train = f"train.{task_of(name).extension}"
    return (folder / MANIFEST).is_file() or find_file(folder, (train,)) is not None


def load_sentences(name: str, folder: Path | str) -> dict[str, list[Sentence]]:
    """Load every split of a task, from a prepared folder or from the published files."""
    task, folder = task_of(name), Path(folder)
    check(
        folder.is_dir(),
        f"{folder} is not a folder; run `acmoe data prepare {name} --from PATH`, or give another",
    )
    if (folder / MANIFEST).is_file():
        read_sentence_manifest(folder)
    files = find_sentence_files(task, folder)
    return {split: read_sentences(task, split, path) for split, path in files.items()}


def read_sentences(task: Task, split: str, path: Path) -> list[Sentence]:
    """Read the rows of one file; errors name the line of a wrong column, label or encoding."""
    rows = _tsv_rows(path) if task.extension == "tsv" else _csv_rows(path)
    label_of = {label: number for number, label in enumerate(task.classes)}
    expected = ", ".join(task.classes) if len(task.classes) < 10 else "one of its 77 categories"
    # GLUE publishes its test sentences without labels.
    fix = f"; without labels remove {path.name}, which is optional" * (split in task.optional)
    sentences = []
    for number, text, label in rows:
        check(
            label in label_of,
            f"{path}: line {number}: label {label!r}; {task.name} expects {expected}{fix}",
        )
        check(bool(text.strip()), f"{path}: line {number}: the sentence is empty; remove the line")
        sentences.append(Sentence(text, label_of[label]))
    check(bool(sentences), f"{path} holds no sentence; expected {task.name}'s {split} rows")
    missing = set(range(len(task.classes))) - {sentence.label for sentence in sentences}
    check(
        split != "train" or not missing,
        f"{path}: no row of {len(missing)} of the {len(task.classes)} classes"
        f" ({task.classes[min(missing, default=0)]} first); is this {task.name}'s training file?",
    )
    return sentences


def _tsv_rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, sentence, label) of tab-separated text without quoting.

    A header line is skipped.
    """
    for number, line in read_lines(path):
        columns = line.rstrip("\r").split("\t")
        check(
            len(columns) == 2,
            f"{path}: line {number} has {len(columns)} tab-separated columns;"
            " expected 2, sentence<TAB>label",
        )
        text, label = columns
        if not (number == 1 and label.strip().lower() == "label"):
            yield number, text, label.strip()


def _csv_rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, text, category) of CSV with quoting; texts may contain newlines."""
    reader = csv.reader((line + "\n" for _, line in read_lines(path)), strict=True)
    header = ["text", "category"]
    number = 1
    try:
        for row in reader:
            check(
                number > 1 or row == header,
                f"{path}: line 1 is {','.join(row)!r}; expected the header text,category",
            )
            check(
                len(row) == 2,
                f"{path}: line {number} has {len(row)} columns; expected 2, text,category",
            )
            if number > 1:
                yield number, row[0], row[1].strip()
            number = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}: line {number}: {error}; expected CSV with double quotes"
        ) from error


def write_sentences(
    task: Task, files: dict[str, Path], sources: list[SourceRecord], folder: Path
) -> None:
    """Check the source files and copy them, decompressed, to a folder with a manifest."""
    splits = {}
    for split, path in files.items():
        rows = len(read_sentences(task, split, path))
        copy = folder / f"{split}.{task.extension}"
        with copy.open("wb") as out:
            out.writelines(read_chunks(path))
        splits[split] = SplitRecord(
            file=copy.name, rows=rows, bytes=copy.stat().st_size, sha256=sha256_of(copy)
        )
    manifest = SentenceManifest(name=task.name, splits=splits, sources=sources)
    write_record(folder / MANIFEST, manifest)


def read_sentence_manifest(folder: Path) -> SentenceManifest:
    """Read the manifest of a prepared folder, and check that its files exist with their sizes."""
    path = folder / MANIFEST
    fix = f"delete {folder} and prepare {folder.name!r} again"
    manifest = read_record(path, SentenceManifest, fix=fix)
    check_record(path, (manifest.format, manifest.version), (FORMAT, VERSION), fix)
    for record in manifest.splits.values():
        check_size(folder / record.file, record.bytes, fix)
    return manifest
