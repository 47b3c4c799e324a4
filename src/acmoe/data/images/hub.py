"""Image sets of the HuggingFace hub, by their id; needs the `text` extra and a network once."""

from typing import Any

import numpy as np

from acmoe.data.images.pixels import Pixels, pillow, to_rgb
from acmoe.data.images.splits import ImageSet, check_labels
from acmoe.errors import UserError, check

_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_IMAGES, _LABELS = ("image", "img", "jpg"), ("label", "labels", "fine_label", "cls")


class HubImages(ImageSet):
    """Rows of a downloaded table."""

    def __init__(self, title: str, rows: Any, split: str) -> None:
        self.column = _column(rows, _IMAGES, title, "images")
        label = _column(rows, _LABELS, title, "labels")
        labels = np.asarray(rows[label], dtype=np.int64)
        names = getattr(rows.features[label], "names", None)
        check(len(labels) > 0, f"{title} ({split}) holds no images")
        classes = [str(n) for n in (range(labels.max() + 1) if names is None else names)]
        check_labels(labels, len(classes), f"{title} ({split})")
        super().__init__(title=title, classes=classes, labels=labels)
        self.rows, self.split = rows, split

    def pixels(self, index: int) -> Pixels:
        try:
            image = self.rows[index][self.column]
        except Exception as error:  # whatever the library raises on a damaged cache or image
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"{self.where(index)} is no readable image ({reason}); clear the hub's cache"
            ) from error
        check(
            isinstance(image, pillow().Image),
            f"{self.where(index)}: column {self.column!r} holds no image",
        )
        return to_rgb(image, self.where(index))

    def where(self, index: int) -> str:
        return f"{self.title} ({self.split}), image {index}"


def open_hub_splits(name: str) -> dict[str, ImageSet]:
    """The splits of a hub data set that have labels; `train` is always there."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "the HuggingFace hub needs the text extra: pip install 'acmoe[text]'"
        ) from error
    try:
        tables = datasets.load_dataset(name)
    except Exception as error:  # the library and its HTTP client raise many unrelated types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"could not fetch {name} from the HuggingFace hub ({reason}); check the id and the "
            "network, or use a local folder with data.name=folder"
        ) from error
    check("train" in tables, f"{name} has no split train; it has {', '.join(tables)}")
    found: dict[str, ImageSet] = {}
    for split, theirs in _SPLITS.items():
        if theirs in tables and _has_labels(tables[theirs]):
            found[split] = HubImages(name, tables[theirs], theirs)
    check("train" in found, f"{name} has no labels in its split train; choose another")
    for images in found.values():
        check(
            images.classes == found["train"].classes,
            f"{images.where(0)} and the rest have other classes than train; choose another",
        )
    return found


def _column(rows: Any, names: tuple[str, ...], title: str, what: str) -> str:
    own = list(rows.features)
    found = next((name for name in names if name in own), None)
    if found is None:
        raise UserError(
            f"{title} has columns {', '.join(own)}; none is known to hold {what} "
            f"({', '.join(names)})"
        )
    return found


def _has_labels(rows: Any) -> bool:
    """A test split without labels says -1 everywhere."""
    label = next((name for name in _LABELS if name in rows.features), None)
    return label is not None and int(np.min(rows[label], initial=0)) >= 0
