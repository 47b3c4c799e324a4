"""Image sets in .npz files, one for each split: pixel arrays, or concatenated image files.

pixels  `images` (N, H, W, channels) uint8, `labels` (N,)
files   `jpeg` (bytes,) uint8 with the files one after the other, `offset` (N + 1,) where each file
        begins, `label` (N,), and optionally `name` (N,)

A file may be compressed as a whole (.npz.xz, .npz.gz). `classes`, an array of names, is optional.
"""

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from acmoe.data.images.folder import SPLITS
from acmoe.data.images.pixels import Pixels, array_to_rgb, decode
from acmoe.data.images.splits import ImageSet, check_labels
from acmoe.data.sources import read_chunks
from acmoe.errors import UserError, check, first_line

Arrays = Mapping[str, NDArray[Any]]


class ArrayImages(ImageSet):
    """Images of one size, stored as a pixel array."""

    def __init__(
        self, title: str, classes: Sequence[str], path: Path, images: NDArray[Any], labels: Any
    ) -> None:
        super().__init__(title=title, classes=classes, labels=labels)
        self.path, self.images = path, images

    def pixels(self, index: int) -> Pixels:
        return array_to_rgb(self.images[index], self.where(index))

    def where(self, index: int) -> str:
        return f"{self.path}, image {index}"


class PackedImages(ImageSet):
    """Encoded image files, concatenated in one byte array."""

    def __init__(
        self, title: str, classes: Sequence[str], path: Path, arrays: Arrays, labels: Any
    ) -> None:
        super().__init__(title=title, classes=classes, labels=labels)
        self.path, self.jpeg, self.offset = path, arrays["jpeg"], arrays["offset"]
        self.names = arrays.get("name")

    def pixels(self, index: int) -> Pixels:
        start, stop = self.offset[index : index + 2]
        return decode(self.jpeg[start:stop].tobytes(), self.where(index))

    def where(self, index: int) -> str:
        name = "" if self.names is None else f" ({self.names[index]})"
        return f"{self.path}, image {index}{name}"


def open_array_splits(folder: Path | str) -> dict[str, ImageSet]:
    """Open the splits of a folder of .npz files; `train` is required."""
    folder = Path(folder)
    fix = "put train.npz and val.npz there, or set data.source to a folder that has them"
    check(folder.is_dir(), f"{folder} is no folder; {fix}")
    paths = {split: _split_file(folder, names) for split, names in SPLITS.items()}
    train = paths.pop("train")
    if train is None:
        raise UserError(f"{folder} has no train.npz (or train*.npz, .xz, .gz); put it there")
    splits = {"train": open_arrays(train, title=folder.name)}
    for split, path in paths.items():
        if path is not None:
            classes = splits["train"].classes
            splits[split] = open_arrays(path, classes=classes, title=folder.name)
    return splits


def open_arrays(
    path: Path | str, *, classes: Sequence[str] | None = None, title: str = ""
) -> ImageSet:
    """Open the images of one .npz file.

    Classes are named by `classes`, else by the file's own array `classes`, else by their numbers.
    A file with both must name the same classes in the same order: its labels count by its own.
    """
    path = Path(path)
    title = title or path.name.partition(".")[0]
    arrays = _load(path)
    packed = "jpeg" in arrays
    key = "label" if packed else "labels"
    for name in ("jpeg", "offset", "label") if packed else ("images", "labels"):
        check(
            name in arrays,
            f"{path} has arrays {', '.join(arrays)}; it needs images and labels, or jpeg, offset "
            "and label",
        )
    labels = arrays[key]
    check(
        np.issubdtype(labels.dtype, np.integer) and labels.ndim == 1 and len(labels) > 0,
        f"{path}: {key} is {labels.dtype} of shape {labels.shape}; give one integer an image",
    )
    labels = labels.astype(np.int64)
    classes = _classes_of(path, arrays, classes, labels)
    check_labels(labels, len(classes), str(path))
    if packed:
        _check_packed(path, arrays, len(labels))
        return PackedImages(title, classes, path, arrays, labels)
    _check_pixels(path, arrays["images"], len(labels))
    return ArrayImages(title, classes, path, arrays["images"], labels)


def _classes_of(
    path: Path, arrays: Arrays, classes: Sequence[str] | None, labels: NDArray[Any]
) -> Sequence[str]:
    """Return the names of the classes that the labels of a file count; see `open_arrays`."""
    named = arrays.get("classes")
    if named is None:
        return [str(n) for n in range(labels.max() + 1)] if classes is None else classes
    check(
        named.ndim == 1,
        f"{path}: classes has shape {named.shape}; give one name for each class",
    )
    own = [str(n) for n in named]
    pairs = enumerate(zip_longest(own, own if classes is None else classes))
    for number, (name, trained) in pairs:
        check(
            name == trained,
            f"{path}: class {number} is {name!r}, and {trained!r} in the training images; name the "
            "same classes in the same order in both files",
        )
    return own


def _split_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Find NAME.npz, or the only file NAME*.npz, plain or compressed; None if there is none."""
    found = [
        path
        for name in names
        for ending in (".npz", ".npz.xz", ".npz.gz")
        for path in sorted(folder.glob(f"{name}*{ending}"))
        if path.name == name + ending or not path.name[len(name)].isalpha()
    ]
    check(
        len(found) < 2,
        f"{folder} has {', '.join(path.name for path in found)} for one split; keep one",
    )
    return found[0] if found else None


def _load(path: Path) -> Arrays:
    check(path.is_file(), f"{path} is not a file; give an .npz file of images")
    compressed = path.suffix != ".npz"
    try:
        with io.BytesIO(b"".join(read_chunks(path))) if compressed else path.open("rb") as source:
            file = np.load(source, allow_pickle=False)
            check(isinstance(file, NpzFile), f"{path} holds one bare array; save it with np.savez")
            _check_memory(path, file.zip)
            return {name: file[name] for name in file.files}
    except UserError:
        raise
    except MemoryError as error:
        raise UserError(
            f"{path} asks for more memory than this machine has; fetch it again"
        ) from error
    except Exception as error:  # the parsers of damaged archives raise errors of many kinds
        raise UserError(
            f"{path} is truncated or no .npz file ({first_line(error)}); fetch it again"
        ) from error


def _check_memory(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse an archive that would not fit into memory: a few bytes can unpack to terabytes."""
    needed = sum(member.file_size for member in archive.infolist())
    memory = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if os.name == "posix" else None
    )
    check(
        memory is None or needed < memory,
        f"{path} unpacks to {needed / 2**30:,.1f} GiB and this machine has "
        f"{(memory or 0) / 2**30:,.1f} GiB of memory; use an image folder instead",
    )


def _check_pixels(path: Path, images: NDArray[Any], count: int) -> None:
    check(
        images.dtype == np.uint8 and images.ndim in (3, 4),
        f"{path}: images is {images.dtype} of shape {images.shape}; give uint8 (images, height, "
        "width, channels)",
    )
    check(
        len(images) == count,
        f"{path} has {len(images):,} images and {count:,} labels; give one label for each image",
    )
    array_to_rgb(images[0], f"{path}, image 0")


def _check_packed(path: Path, arrays: Arrays, count: int) -> None:
    jpeg, offset = arrays["jpeg"], arrays["offset"]
    check(
        jpeg.dtype == np.uint8 and jpeg.ndim == 1,
        f"{path}: jpeg is {jpeg.dtype} of shape {jpeg.shape}; give the files' bytes as uint8",
    )
    check(
        np.issubdtype(offset.dtype, np.integer) and offset.shape == (count + 1,),
        f"{path}: offset is {offset.dtype} of shape {offset.shape}; {count:,} labels need "
        f"{count + 1:,} integers",
    )
    check(
        offset[0] == 0 and offset[-1] == len(jpeg) and bool((np.diff(offset) >= 0).all()),
        f"{path}: offset does not rise from 0 to the {len(jpeg):,} bytes of jpeg; pack it again",
    )
    names = arrays.get("name")
    check(
        names is None or names.shape == (count,),
        f"{path}: name has shape {() if names is None else names.shape}; give {count:,} names",
    )
