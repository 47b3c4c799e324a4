"""Compare the data in a run's data folder with the data that the run was trained on.

`state` is state.json of the run's last checkpoint. Runs of version 0.1 lack some of its fields, and
what they lack is not compared.
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from acmoe.data.images.splits import ImageSet, ImageSplits
from acmoe.data.text.corpus import Corpus
from acmoe.data.text.vocabulary import Vocabulary
from acmoe.errors import check


def check_present(folder: Path, data: Path) -> None:
    """Raise where the folder or file of a run's data is missing; a run keeps its data's place."""
    seen = "" if data.is_absolute() else f" (seen from {Path.cwd()})"
    check(
        data.exists(),
        f"{data}{seen}, which {folder} was trained on, is missing; move it back, or put a link to "
        "its new place there",
    )


def check_corpus(
    folder: Path, corpus: Corpus, vocabulary: Vocabulary | None, state: Mapping[str, Any]
) -> None:
    """Raise where token ids mean other words than in the run's vocabulary.

    Warn where the training text is another one: the test text may then hold sentences that the
    model was trained on.
    """
    check(
        vocabulary is None or vocabulary == corpus.vocabulary,
        f"{corpus.folder} has another vocabulary than {folder} was trained with; prepare that "
        "corpus again",
    )
    if _differs(state, "corpus_sha256", corpus.manifest.splits["train"].sha256):
        _warn(f"{corpus.folder} holds another training text", folder)


def check_images(folder: Path, images: ImageSplits, state: Mapping[str, Any]) -> None:
    """Raise where the classes have other names or another order than in the run's training.

    Warn where there are other training images: the test images may then be among those that the
    model was trained on.
    """
    check(
        not _differs(state, "classes_sha256", classes_sha256(images.classes)),
        f"{images.train.title} has other classes than {folder} was trained with, or another order "
        "of them; restore their folders",
    )
    if _differs(state, "labels_sha256", labels_sha256(images.train)):
        _warn(f"{images.train.title} holds other training images", folder)


def classes_sha256(classes: Sequence[str]) -> str:
    """Return the checksum of the names of classes, in the order of their labels."""
    return hashlib.sha256("\0".join(classes).encode("utf-8", "surrogateescape")).hexdigest()


def labels_sha256(images: ImageSet) -> str:
    """Return the checksum of the labels of images: reading all pixels would take too long."""
    return hashlib.sha256(images.labels.tobytes()).hexdigest()


def _differs(state: Mapping[str, Any], key: str, now: str) -> bool:
    return bool(state.get(key, now) != now)


def _warn(what: str, folder: Path) -> None:
    warnings.warn(
        f"{what} than {folder} was trained on; figures are of the data that is there now",
        stacklevel=4,
    )
