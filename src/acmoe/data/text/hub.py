"""Published data sets from the HuggingFace hub, written as the local files `prepare` takes."""

import csv
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from acmoe.data.folders import build_folder
from acmoe.data.progress import Progress, silent
from acmoe.data.text.banking77 import CATEGORIES
from acmoe.data.text.registry import Dataset, dataset
from acmoe.errors import UserError, check

Row = Mapping[str, Any]
_HUB_SPLITS = {"train": "train", "valid": "validation", "dev": "validation", "test": "test"}


def download(name: str, folder: Path, *, progress: Progress = silent) -> Path:
    """Fetch a data set's splits into `folder` as text files; needs the `text` extra and a network.

    A folder that holds files already is kept as it is.
    """
    entry, folder = dataset(name), Path(folder)
    check(bool(entry.hub), f"{name} is not fetched from the hub; its source: {entry.origin}")
    hub = _hub_library()

    def build(new: Path) -> None:
        for split, (file, write) in _files(name).items():
            rows = _rows(hub, entry, _HUB_SPLITS[split])
            write(new / file, _reported(rows, file, progress))

    build_folder(folder, build, lambda: folder.is_dir() and any(folder.iterdir()))
    return folder


def _hub_library() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            "the HuggingFace hub needs the text extra: pip install 'acmoe[text]'"
        ) from error


def _rows(hub: Any, entry: Dataset, split: str) -> Any:
    try:
        return hub.load_dataset(entry.hub, entry.hub_config or None, split=split)
    except Exception as error:  # the library and its HTTP client raise many unrelated types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"could not fetch {entry.hub} from the HuggingFace hub ({reason}); check the network,"
            f" or prepare local files: {entry.layout}"
        ) from error


def _reported(rows: Any, stage: str, progress: Progress) -> Iterable[Row]:
    for done, row in enumerate(rows, start=1):
        yield row
        if done % 1000 == 0 or done == len(rows):
            progress(stage, done, len(rows))


_Writer = Callable[[Path, Iterable[Row]], None]


def _files(name: str) -> dict[str, tuple[str, _Writer]]:
    """The file of each split to write, and how."""
    if name == "wikitext103":
        return {s: (f"wiki.{s}.tokens", _write_lines) for s in ("train", "valid", "test")}
    if name == "banking77":
        return {s: (f"{s}.csv", _write_csv) for s in ("train", "test")}
    splits = ("train", "dev") if name == "sst2" else ("train", "dev", "test")
    return {s: (f"{s}.tsv", _write_tsv) for s in splits}


def _write_lines(path: Path, rows: Iterable[Row]) -> None:
    """A row of the hub is a line, with its newline or, for a blank line, without."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(row["text"].rstrip("\n") + "\n" for row in rows)


def _write_tsv(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("sentence\tlabel\n")
        for row in rows:
            text = row["sentence"] if "sentence" in row else row["text"]
            file.write(f"{' '.join(text.split())}\t{row['label']}\n")


def _write_csv(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "category"])
        writer.writerows([row["text"], CATEGORIES[row["label"]]] for row in rows)
