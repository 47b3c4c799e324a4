"""Open the image set that a config names."""

from acmoe.config.images.data import ImageDataConfig
from acmoe.data.images.arrays import open_array_splits
from acmoe.data.images.digits import load_digit_splits
from acmoe.data.images.folder import open_splits
from acmoe.data.images.hub import open_hub_splits
from acmoe.data.images.splits import ImageSet, ImageSplits, make_splits


def load_images(config: ImageDataConfig, *, warn: bool = True) -> ImageSplits:
    """Open the training, validation and test images. Image files are listed, not yet read.

    With `warn`, a warning counts the files in a folder that are no images.
    """
    if config.name == "digits":
        return load_digit_splits(size=config.size, seed=config.seed)
    assert config.source is not None
    found: dict[str, ImageSet]
    if config.name == "folder":
        found = {**open_splits(config.source, warn=warn)}
    elif config.name == "arrays":
        found = open_array_splits(config.source)
    else:
        found = open_hub_splits(config.source)
    return make_splits(
        found["train"],
        found.get("valid"),
        found.get("test"),
        holdout=config.holdout,
        seed=config.seed,
    )
