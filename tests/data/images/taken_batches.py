"""Take training batches, and compare them."""

import torch

from acmoe.data.images.batches import ImageBatch, TrainingImages
from acmoe.data.images.on_device import DeviceImages


def take(source: TrainingImages | DeviceImages, count: int) -> list[ImageBatch]:
    """Return the next batches and close the source."""
    found = [next(source) for _ in range(count)]
    source.close()
    return found


def same(left: ImageBatch, right: ImageBatch) -> bool:
    """Return whether images, labels and seed are equal."""
    return (
        torch.equal(left.images, right.images)
        and torch.equal(left.labels, right.labels)
        and left.seed == right.seed
    )
