"""ImageNet-A, -R and -O: each has folders for 200 of ImageNet's 1000 classes."""

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from acmoe.data.images.splits import ImageSet, Indices
from acmoe.errors import UserError, check

Shift = Literal["imagenet-a", "imagenet-r", "imagenet-o"]

IMAGENET_CLASSES = 1000
SUBSET = 200
# First 16 hex digits of the SHA-256 of the sorted class numbers, joined by commas.
_DIGESTS = {
    "imagenet-a": "973e8c3e530bf5db",
    "imagenet-r": "a1d9a9ace3098120",
    "imagenet-o": "38e74578856f9077",
}


def class_subset(shift: Shift, folders: Sequence[str], classes: Sequence[str]) -> Indices:
    """Return the indices, among a model's classes, of a shifted set's folders, in their order.

    Logits selected by these indices have the order of the set's labels. Folders and classes are
    named by WordNet ids. For a model with all 1000 classes of ImageNet the subset must be the
    published one; for other models any subset is accepted.
    """
    if shift not in _DIGESTS:
        raise UserError(f"shift={shift!r} is unknown; choose one of {', '.join(_DIGESTS)}")
    numbers = {name: number for number, name in enumerate(classes)}
    missing = sorted(set(folders) - set(numbers))
    check(
        not missing,
        f"{shift} has folders {', '.join(missing[:3])} ({len(missing)} in all) that are no class "
        "of the model; name folders and classes by their WordNet ids",
    )
    subset = np.array([numbers[name] for name in folders], dtype=np.int64)
    check(
        len(subset) >= 2,
        f"{shift} has folders for {len(subset)} classes of the model; at least 2 are needed",
    )
    if len(classes) == IMAGENET_CLASSES:
        _check_published(shift, subset, classes)
    return subset


def _check_published(shift: Shift, subset: Indices, classes: Sequence[str]) -> None:
    check(
        list(classes) == sorted(classes),
        "the model's 1000 classes are not in the order of their WordNet ids; sort them",
    )
    check(
        len(subset) == SUBSET,
        f"{shift} has {len(subset)} class folders, published are {SUBSET}; fetch it again",
    )
    digest = hashlib.sha256(",".join(map(str, np.sort(subset))).encode()).hexdigest()[:16]
    check(
        digest == _DIGESTS[shift],
        f"the {SUBSET} class folders are not those of {shift} (digest {digest}, published "
        f"{_DIGESTS[shift]}); check that the folder holds that set",
    )


def images_of(images: ImageSet, folders: Sequence[str]) -> ImageSet:
    """Return the images whose class is named in `folders`."""
    wanted = [number for number, name in enumerate(images.classes) if name in set(folders)]
    found = np.flatnonzero(np.isin(images.labels, wanted))
    check(
        len(found) > 0,
        f"{images.title} has no image of the {len(folders)} classes asked for; is it ImageNet?",
    )
    return images.subset(found)
