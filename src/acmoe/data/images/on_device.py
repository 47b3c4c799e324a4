"""Training images that stay in device memory: no step reads, decodes or copies an image.

B images of a batch (on this rank) of S pixels a side; N images in the set, stored at R pixels a
side.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import numpy as np
import torch
from torch import Tensor

from acmoe.config.images.data import AugmentConfig, ImageDataConfig
from acmoe.data.images.batches import ImageBatch, TrainingImages
from acmoe.data.images.crops import cut_boxes, random_boxes
from acmoe.data.images.order import ShuffledBatches
from acmoe.data.images.pixels import centre_crop
from acmoe.data.images.splits import ImageSet
from acmoe.data.seeding import derive_seed
from acmoe.data.transfer import to_device
from acmoe.errors import UserError

CHUNK = 64  # images per task of a reading thread; one task per image costs more than the reading


class DeviceImages(ShuffledBatches):
    """An endless iterator over shuffled training batches, gathered and cropped on the device.

    The images of each batch are those of `TrainingImages`, the crops are not: they are cut from the
    square centre of an image whose shorter side was resized to `data.resize`, and are drawn for the
    whole batch at once.
    """

    def __init__(
        self,
        images: ImageSet,
        data: ImageDataConfig,
        augment: AugmentConfig,
        *,
        batch: int,
        device: torch.device,
        seed: int = 0,
        rows: Sequence[int] | None = None,
    ) -> None:
        super().__init__(images, batch=batch, seed=seed, rows=rows, repeats=augment.repeats)
        self.data, self.augment, self.device = data, augment, device
        self.pixels = device_pixels(images, data, device)
        self.labels = to_device(images.labels, device)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ImageBatch:
        number = self.number
        index_B = to_device(self.indices(number), self.device)
        images, labels = self._crop(self.pixels[index_B], number), self.labels[index_B]
        self.number += 1
        return ImageBatch(images, labels, self.batch_seed(number))

    def _crop(self, whole: Tensor, number: int) -> Tensor:
        side, size = whole.shape[-1], self.data.size
        if self.augment.crop is None:
            edge = round((side - size) / 2)
            return whole[..., edge : edge + size, edge : edge + size]
        # Drawn for the batch of all ranks, so that crops do not depend on their number.
        rng = np.random.default_rng(derive_seed(self.seed, "crops", number, 0))
        boxes = random_boxes(self.batch, side, self.augment.crop, self.augment.ratio, rng)
        return cut_boxes(whole, to_device(boxes[self.share.rows], self.device), size)

    def close(self) -> None:
        """Do nothing: there are no threads to stop."""


def device_pixels(images: ImageSet, data: ImageDataConfig, device: torch.device) -> Tensor:
    """Read all images and return them on the device as (N, 3, R, R) uint8."""
    side = data.shorter_side
    whole = np.empty((len(images), side, side, 3), np.uint8)

    def read(start: int) -> None:
        for index in range(start, min(start + CHUNK, len(images))):
            whole[index] = centre_crop(images.pixels(index), resize=side, size=side)

    with ThreadPoolExecutor(data.threads, thread_name_prefix="images") as pool:
        for _ in pool.map(read, range(0, len(images), CHUNK)):
            pass  # raises the exception of a thread, if any
    try:
        return torch.from_numpy(whole).to(device).permute(0, 3, 1, 2).contiguous()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{len(images):,} images of {side} pixels a side take {2 * whole.nbytes / 1e9:.1f} GB "
            f"of {device} on their way there, which has not as much left; use data.on_device=false"
        ) from error


def training_images(
    images: ImageSet,
    data: ImageDataConfig,
    augment: AugmentConfig,
    *,
    batch: int,
    device: torch.device,
    seed: int = 0,
    rows: Sequence[int] | None = None,
) -> TrainingImages | DeviceImages:
    """Return the training batches of a run: in device memory if `data.on_device`, else decoded."""
    if data.on_device:
        return DeviceImages(images, data, augment, batch=batch, device=device, seed=seed, rows=rows)
    return TrainingImages(images, data, augment, batch=batch, seed=seed, rows=rows)
