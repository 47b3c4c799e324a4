"""Download data sets from the HuggingFace hub as the local files that `prepare` reads."""

import csv
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from acmoe.data.folders import build_folder
from acmoe.data.hub import hub_library, load_from_hub
from acmoe.data.progress import Progress, silent
from acmoe.data.text.banking77 import CATEGORIES
from acmoe.data.text.registry import dataset
from acmoe.errors import check

Row = Mapping[str, Any]
_HUB_SPLITS = {"train": "train", "valid": "validation", "dev": "validation", "test": "test"}


def download(name: str, folder: Path, *, progress: Progress = silent) -> Path:
    """Download the splits of a data set to `folder` as text files.

    Needs the `data` extra and a network. A folder that already has files is left unchanged.
    """
    entry, folder = dataset(name), Path(folder)
    check(bool(entry.hub), f"{name} is not fetched from the hub; its source: {entry.origin}")
    hub_library()  # fails here if it is not installed, even where nothing is left to download
    fix = f"check the network, or prepare local files: {entry.layout}"

    def build(new: Path) -> None:
        for split, (file, write) in _files(name).items():
            rows = load_from_hub(
                entry.hub, entry.hub_config or None, split=_HUB_SPLITS[split], fix=fix
            )
            write(new / file, _report_rows(rows, file, progress))

    build_folder(folder, build, lambda: folder.is_dir() and any(folder.iterdir()))
    return folder


def _report_rows(rows: Any, stage: str, progress: Progress) -> Iterable[Row]:
    """Yield the rows and report progress every 1000 of them."""
    for done, row in enumerate(rows, start=1):
        yield row
        if done % 1000 == 0 or done == len(rows):
            progress(stage, done, len(rows))


_Writer = Callable[[Path, Iterable[Row]], None]


def _files(name: str) -> dict[str, tuple[str, _Writer]]:
    """Map each split to its file name and the function that writes it."""
    if name == "wikitext103":
        return {s: (f"wiki.{s}.tokens", _write_lines) for s in ("train", "valid", "test")}
    if name == "banking77":
        return {s: (f"{s}.csv", _write_csv) for s in ("train", "test")}
    splits = ("train", "dev") if name == "sst2" else ("train", "dev", "test")
    return {s: (f"{s}.tsv", _write_tsv) for s in splits}


def _write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write one line per row; the hub's rows end with a newline, except for blank lines."""
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
