"""Image sets of the HuggingFace hub, by id. Needs the `data` extra, and a network once."""

from typing import Any

import numpy as np

from acmoe.data.hub import load_from_hub
from acmoe.data.images.pixels import Pixels, pillow, to_rgb
from acmoe.data.images.splits import ImageSet, check_labels
from acmoe.errors import UserError, check, first_line

_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_IMAGES, _LABELS = ("image", "img", "jpg"), ("label", "labels", "fine_label", "cls")


class HubImages(ImageSet):
    """Images and labels of one split of a hub data set."""

    def __init__(self, title: str, rows: Any, split: str) -> None:
        self.column = _column(rows, _IMAGES, title, "images")
        label = _column(rows, _LABELS, title, "labels")
        labels = np.asarray(rows[label], dtype=np.int64)
        names = getattr(rows.features[label], "names", None)
        check(len(labels) > 0, f"{title} ({split}) holds no images; choose another set")
        classes = [str(n) for n in (range(labels.max() + 1) if names is None else names)]
        check_labels(labels, len(classes), f"{title} ({split})")
        super().__init__(title=title, classes=classes, labels=labels)
        self.rows, self.split = rows, split

    def pixels(self, index: int) -> Pixels:
        try:
            image = self.rows[index][self.column]
        except Exception as error:  # the library raises many types on a damaged cache or image
            raise UserError(
                f"{self.where(index)} is no readable image ({first_line(error)}); clear the hub's "
                "cache"
            ) from error
        check(
            isinstance(image, pillow().Image),
            f"{self.where(index)}: column {self.column!r} holds no image; choose another set",
        )
        return to_rgb(image, self.where(index))

    def where(self, index: int) -> str:
        return f"{self.title} ({self.split}), image {index}"


def open_hub_splits(name: str) -> dict[str, ImageSet]:
    """Download the splits of a hub data set that have labels; `train` is required."""
    tables = load_from_hub(
        name,
        fix="check the id and the network, or use a local folder with data.name=folder",
    )
    check(
        "train" in tables,
        f"{name} has no split train; it has {', '.join(tables)}: choose another set",
    )
    found: dict[str, ImageSet] = {}
    for split, hub_split in _SPLITS.items():
        if hub_split in tables and _has_labels(tables[hub_split]):
            found[split] = HubImages(name, tables[hub_split], hub_split)
    check("train" in found, f"{name} has no labels in its split train; choose another")
    for images in found.values():
        check(
            images.classes == found["train"].classes,
            f"{images.where(0)} and the rest have other classes than train; choose another",
        )
    return found


def _column(rows: Any, names: tuple[str, ...], title: str, what: str) -> str:
    columns = list(rows.features)
    found = next((name for name in names if name in columns), None)
    if found is None:
        raise UserError(
            f"{title} has columns {', '.join(columns)}; none is known to hold {what} "
            f"({', '.join(names)}): choose another set, or rename the column in a copy of it"
        )
    return found


def _has_labels(rows: Any) -> bool:
    """Return False for a split without a label column, or with the label -1 for unlabelled rows."""
    label = next((name for name in _LABELS if name in rows.features), None)
    return label is not None and int(np.min(rows[label], initial=0)) >= 0
