"""A set of labelled images, wherever it is stored, and the splits of a data set."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from acmoe.data.images.pixels import Pixels
from acmoe.data.seeding import derive_seed
from acmoe.errors import UserError, check

Indices = NDArray[np.int64]


class ImageSet:
    """N images with labels 0 to len(classes) - 1. A new store writes `pixels` and `where`."""

    def __init__(self, *, title: str, classes: Sequence[str], labels: Sequence[int] | Indices):
        self.title = title
        self.classes = tuple(classes)
        self.labels: Indices = np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, index: int) -> Pixels:
        """(H, W, 3) RGB. Called by several threads at once."""
        raise NotImplementedError(f"{type(self).__name__} must define pixels")

    def where(self, index: int) -> str:
        """The image's name in messages."""
        raise NotImplementedError(f"{type(self).__name__} must define where")

    def subset(self, indices: Indices) -> "ImageSet":
        return Subset(self, indices)


class Subset(ImageSet):
    """Some images of another set."""

    def __init__(self, whole: ImageSet, indices: Indices) -> None:
        super().__init__(title=whole.title, classes=whole.classes, labels=whole.labels[indices])
        self.whole, self.indices = whole, indices

    def pixels(self, index: int) -> Pixels:
        return self.whole.pixels(int(self.indices[index]))

    def where(self, index: int) -> str:
        return self.whole.where(int(self.indices[index]))


@dataclass(frozen=True, kw_only=True)
class ImageSplits:
    """What a run trains on, chooses its checkpoint by, and is scored on at the end."""

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
    """Three splits from what a source has.

    Without images kept back, a source's one labelled evaluation split serves as both: so ImageNet
    is used everywhere, and the best checkpoint is then chosen on the images it is scored on.
    """
    own = valid if test is None else test
    if holdout > 0:
        kept_back, rest = stratified(train.labels, (holdout,), seed=seed)
        check(
            len(kept_back) > 0,
            f"holdout={holdout} of {len(train):,} training images is none of any class; raise it",
        )
        return ImageSplits(
            train=train.subset(rest),
            valid=train.subset(kept_back),
            test=train.subset(kept_back) if own is None else own,
        )
    if own is None:
        raise UserError(
            f"{train.title} has neither a val nor a test split; keep some training images back "
            "with data.holdout=0.1"
        )
    return ImageSplits(train=train, valid=own if valid is None else valid, test=own)


def stratified(labels: Indices, shares: Sequence[float], *, seed: int) -> list[Indices]:
    """Indices dealt out by share within every class, and last those that remain; each sorted.

    The same seed gives the same parts on every machine. A class gives floor(share * its images).
    """
    parts: list[list[Indices]] = [[] for _ in range(len(shares) + 1)]
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        rng = np.random.default_rng(derive_seed(seed, "split of class", int(label)))
        own = own[rng.permutation(len(own))]
        counts = [int(share * len(own)) for share in shares]
        ends = np.cumsum(counts)
        for part, piece in zip(parts, np.split(own, ends), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]


def check_labels(labels: Indices, num_classes: int, where: str) -> None:
    """Every label names one of the classes."""
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        first = int(wrong[0])
        raise UserError(
            f"{where} has label {labels[first]} at image {first}, and {len(wrong):,} such labels "
            f"in all; the {num_classes} classes are numbered 0 to {num_classes - 1}"
        )
