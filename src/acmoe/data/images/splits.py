"""The interface of labelled image sets, and the splits of a data set."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from acmoe.data.images.pixels import Pixels
from acmoe.data.seeding import derive_seed
from acmoe.errors import UserError, check

Indices = NDArray[np.int64]


class ImageSet:
    """N images with labels 0 to len(classes) - 1. Subclasses define `pixels` and `where`."""

    def __init__(self, *, title: str, classes: Sequence[str], labels: Sequence[int] | Indices):
        self.title = title
        self.classes = tuple(classes)
        self.labels: Indices = np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, index: int) -> Pixels:
        """Return image `index` as RGB (H, W, 3). Must be thread-safe."""
        raise NotImplementedError(f"{type(self).__name__} must define pixels")

    def probe(self, index: int) -> None:
        """Raise a UserError if image `index` is found to be unreadable at little cost."""

    def where(self, index: int) -> str:
        """Name an image for messages."""
        raise NotImplementedError(f"{type(self).__name__} must define where")

    def subset(self, indices: Indices) -> "ImageSet":
        """Return the images of those indices as a set of their own."""
        return Subset(self, indices)


class Subset(ImageSet):
    """A selection of the images of another set."""

    def __init__(self, whole: ImageSet, indices: Indices) -> None:
        super().__init__(title=whole.title, classes=whole.classes, labels=whole.labels[indices])
        self.whole, self.indices = whole, indices

    def pixels(self, index: int) -> Pixels:
        return self.whole.pixels(int(self.indices[index]))

    def probe(self, index: int) -> None:
        self.whole.probe(int(self.indices[index]))

    def where(self, index: int) -> str:
        return self.whole.where(int(self.indices[index]))


@dataclass(frozen=True, kw_only=True)
class ImageSplits:
    """Images to train on (train), to select the best checkpoint (valid) and to score it (test)."""

    train: ImageSet
    valid: ImageSet
    test: ImageSet

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    def __getitem__(self, split: str) -> ImageSet:
        found = {"train": self.train, "valid": self.valid, "test": self.test}
        if split not in found:
            raise UserError(f"split={split!r} is unknown; choose one of {', '.join(found)}")
        return found[split]


def make_splits(
    train: ImageSet, valid: ImageSet | None, test: ImageSet | None, *, holdout: float, seed: int
) -> ImageSplits:
    """Make three splits from those that a source has.

    With `holdout`, that fraction of the training images becomes `valid`. Without it, a source with
    a single labelled evaluation split uses it both as `valid` and as `test`, as is usual with
    ImageNet; the best checkpoint is then selected on the images it is scored on.
    """
    evaluation = valid if test is None else test
    if holdout > 0:
        held_out, rest = stratified(train.labels, (holdout,), seed=seed)
        check(
            len(held_out) > 0,
            f"holdout={holdout} of {len(train):,} training images is none of any class; raise it",
        )
        return ImageSplits(
            train=train.subset(rest),
            valid=train.subset(held_out),
            test=train.subset(held_out) if evaluation is None else evaluation,
        )
    if evaluation is None:
        raise UserError(
            f"{train.title} has neither a val nor a test split; keep some training images back "
            "with data.holdout=0.1"
        )
    return ImageSplits(train=train, valid=evaluation if valid is None else valid, test=evaluation)


def stratified(labels: Indices, shares: Sequence[float], *, seed: int) -> list[Indices]:
    """Split indices at random into one part per share plus the rest, within every class.

    Each part takes floor(share * n) of the n images of a class, and is sorted. The same seed gives
    the same parts on every machine.
    """
    parts: list[list[Indices]] = [[] for _ in range(len(shares) + 1)]
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        rng = np.random.default_rng(derive_seed(seed, "split of class", int(label)))
        of_class = of_class[rng.permutation(len(of_class))]
        counts = [int(share * len(of_class)) for share in shares]
        ends = np.cumsum(counts)
        for part, piece in zip(parts, np.split(of_class, ends), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]


def check_labels(labels: Indices, num_classes: int, where: str) -> None:
    """Check that every label lies in 0 to num_classes - 1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        first = int(wrong[0])
        raise UserError(
            f"{where} has label {labels[first]} at image {first}, and {len(wrong):,} such labels "
            f"in all; the {num_classes} classes are numbered 0 to {num_classes - 1}"
        )
