"""Image sets in folders named by class: ROOT/SPLIT/CLASS/file, the layout of ImageNet."""

import os
from collections.abc import Sequence
from pathlib import Path

from acmoe.data.images.pixels import Pixels, decode
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

    def where(self, index: int) -> str:
        return self.files[index]


def open_folder(
    folder: Path | str, *, classes: Sequence[str] | None = None, title: str = ""
) -> FolderImages:
    """List the images of a folder of class folders.

    The classes are the sorted names of the folders. If `classes` is given, it defines the classes
    instead, and every folder must be named after one of them.
    """
    folder = Path(folder)
    names = _class_folders(folder)
    numbers = {name: number for number, name in enumerate(classes or names)}
    files: list[str] = []
    labels: list[int] = []
    for name in names:
        check(
            name in numbers,
            f"{folder / name} is not among the {len(numbers)} classes trained on; remove it, or "
            "train on images that have it",
        )
        of_class = _image_files(folder / name)
        files += of_class
        labels += [numbers[name]] * len(of_class)
    return FolderImages(title or folder.name, classes or names, files, labels)


def open_splits(root: Path | str) -> dict[str, FolderImages]:
    """Open the splits of a data set in folders; `train` is required."""
    root = Path(root)
    fix = "put train/CLASS/ and val/CLASS/ there, or set data.source to a folder that has them"
    check(root.is_dir(), f"{root} is no folder; {fix}")
    found = {
        split: next((root / name for name in names if (root / name).is_dir()), None)
        for split, names in SPLITS.items()
    }
    train = found.pop("train")
    if train is None:
        raise UserError(f"{root} has no folder train; {fix}")
    splits = {"train": open_folder(train, title=root.name)}
    for split, folder in found.items():
        # ImageNet's test images have no class folders and no labels: they cannot be scored.
        if folder is not None and (split != "test" or _has_classes(folder)):
            splits[split] = open_folder(folder, classes=splits["train"].classes, title=root.name)
    return splits


def _has_classes(folder: Path) -> bool:
    return any(entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith("."))


def _class_folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from error
    names = sorted(entry.name for entry in entries if entry.is_dir())
    if not names:
        loose = any(entry.name.lower().endswith(SUFFIXES) for entry in entries)
        what = "holds images outside class folders" if loose else "holds no class folders"
        raise UserError(f"{folder} {what}; sort its images into one folder for each class")
    return names


def _image_files(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as found:
            files = sorted(
                entry.path
                for entry in found
                if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".")
            )
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from error
    check(
        len(files) > 0,
        f"{folder} holds no images ({', '.join(SUFFIXES[:3])}, ...); fill it, or remove the class",
    )
    return files
