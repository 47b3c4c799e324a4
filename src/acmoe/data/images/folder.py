"""Image sets in folders named by class: ROOT/SPLIT/CLASS/file, the layout of ImageNet."""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from acmoe.data.images.pixels import Pixels, check_header, decode
from acmoe.data.images.splits import ImageSet
from acmoe.errors import UserError, check

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
SPLITS = {"train": ("train",), "valid": ("val", "valid", "validation"), "test": ("test",)}


class FolderImages(ImageSet):
    """The image files below a folder of class folders, in sorted order."""

    def __init__(
        self, title: str, classes: Sequence[str], files: Sequence[str], labels: Sequence[int]
    ) -> None:
        super().__init__(title=title, classes=classes, labels=labels)
        self.files = files  # str instead of Path to save memory: ImageNet has over a million

    def pixels(self, index: int) -> Pixels:
        return decode(self.files[index], self.where(index))

    def probe(self, index: int) -> None:
        check_header(self.files[index], self.where(index))

    def where(self, index: int) -> str:
        return self.files[index]


def open_folder(
    folder: Path | str,
    *,
    classes: Sequence[str] | None = None,
    title: str = "",
    warn: bool = True,
) -> FolderImages:
    """List the images of a folder of class folders, and of the folders within these.

    With `warn`, a warning counts the files that are no images. The classes are the sorted names of
    the class folders. If `classes` is given, it defines the classes instead, and every class folder
    must be named after one of them.
    """
    folder = Path(folder)
    names, others = _class_folders(folder)
    numbers = {name: number for number, name in enumerate(classes or names)}
    files: list[str] = []
    labels: list[int] = []
    for name in names:
        check(
            name in numbers,
            f"{folder / name} is not among the {len(numbers)} classes trained on; remove it, or "
            "train on images that have it",
        )
        of_class = _image_files(folder / name, others)
        files += of_class
        labels += [numbers[name]] * len(of_class)
    if warn:
        _say_left_out(folder, others)
    return FolderImages(title or folder.name, classes or names, files, labels)


def open_splits(root: Path | str, *, warn: bool = True) -> dict[str, FolderImages]:
    """Open the splits of a data set in folders; `train` is required. `open_folder` has `warn`."""
    root = Path(root)
    fix = "put train/CLASS/ and val/CLASS/ there, or set data.source to a folder that has them"
    check(root.is_dir(), f"{root} is no folder; {fix}")
    found = {split: _split_folder(root, names) for split, names in SPLITS.items()}
    train = found.pop("train")
    if train is None:
        raise UserError(f"{root} has no folder train; {fix}")
    splits = {"train": open_folder(train, title=root.name, warn=warn)}
    for split, folder in found.items():
        # ImageNet's test images have no class folders and no labels: they cannot be scored.
        if folder is not None and (split != "test" or _has_classes(folder)):
            classes = splits["train"].classes
            splits[split] = open_folder(folder, classes=classes, title=root.name, warn=warn)
    return splits


def _split_folder(root: Path, names: Sequence[str]) -> Path | None:
    """Return the folder of a split, under the one of its names that is there; None if none is."""
    found = [root / name for name in names if (root / name).is_dir()]
    check(
        len(found) < 2,
        f"{root} has {', '.join(path.name for path in found)} for one split; keep one",
    )
    return found[0] if found else None


def _has_classes(folder: Path) -> bool:
    return any(entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith("."))


def _listed(folder: Path | str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that are not hidden."""
    try:
        with os.scandir(folder) as found:
            return [entry for entry in found if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}; make it readable") from error


def _class_folders(folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of the class folders, and the image files that lie beside them."""
    entries = _listed(folder)
    names = sorted(entry.name for entry in entries if entry.is_dir())
    loose = [
        entry.path
        for entry in entries
        if entry.name.lower().endswith(SUFFIXES) and not entry.is_dir()
    ]
    if not names:
        what = "holds images outside class folders" if loose else "holds no class folders"
        raise UserError(f"{folder} {what}; sort its images into one folder for each class")
    return names, loose


def _image_files(folder: Path, others: list[str]) -> list[str]:
    """Return the sorted image files of a class folder and of the folders in it.

    Files of other kinds are added to `others`.
    """
    files = sorted(_images_below(folder, others))
    check(
        len(files) > 0,
        f"{folder} holds no images ({', '.join(SUFFIXES[:3])}, ...); fill it, or remove the class",
    )
    return files


def _images_below(folder: Path | str, others: list[str]) -> Iterator[str]:
    """Yield the image files below a folder; hidden files and folders are left out."""
    for entry in _listed(folder):
        if entry.is_dir():
            if entry.is_symlink():
                _check_no_circle(entry.path)
            yield from _images_below(entry.path, others)
        elif entry.name.lower().endswith(SUFFIXES):
            yield entry.path
        else:
            others.append(entry.path)


def _check_no_circle(link: str) -> None:
    """Raise where a link to a folder leads back to a folder that holds the link."""
    place, target = os.path.realpath(os.path.dirname(link)), os.path.realpath(link)
    check(
        not Path(place).is_relative_to(target),
        f"{link} is a link to a folder that holds it; remove the link",
    )


def _say_left_out(folder: Path, others: Sequence[str]) -> None:
    """Warn of files that are not read, for their names or since they lie in no class folder."""
    if others:
        logging.getLogger("acmoe").warning(
            f"{folder}: {len(others):,} {'file is' if len(others) == 1 else 'files are'} not read, "
            f"such as {min(others)}; images lie in class folders, with names that end in "
            f"{', '.join(SUFFIXES)}"
        )
