"""Batches of an image set, decoded in advance by threads, and equal for equal seeds.

B images of a batch (on this rank) of S pixels a side.

Everything random about a batch follows from the seed and the number of the batch alone. The number
of threads, and what they decoded in advance, have no influence.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from acmoe.config.images.attack import AttackConfig
from acmoe.config.images.data import (
    AugmentConfig,
    ImageDataConfig,
    ImageEvaluateConfig,
    Order,
)
from acmoe.data.images.order import ShuffledBatches
from acmoe.data.images.pixels import Pixels, centre_crop, random_crop
from acmoe.data.images.splits import ImageSet, Indices
from acmoe.data.seeding import derive_seed
from acmoe.errors import check

AHEAD = 2  # batches decoded in advance


class ImageBatch(NamedTuple):
    images: Tensor  # (B, 3, S, S) uint8
    labels: Tensor  # (B,) int64
    seed: int  # for later random draws on this batch, such as its augmentation


class TrainingImages(ShuffledBatches):
    """An endless iterator over shuffled training batches, decoded and cropped by threads."""

    def __init__(
        self,
        images: ImageSet,
        data: ImageDataConfig,
        augment: AugmentConfig,
        *,
        batch: int,
        seed: int = 0,
        rows: Sequence[int] | None = None,
    ) -> None:
        super().__init__(images, batch=batch, seed=seed, rows=rows, repeats=augment.repeats)
        self.data, self.augment = data, augment
        self._pool = ThreadPoolExecutor(data.threads, thread_name_prefix="images")
        self._ahead: deque[tuple[Indices, list[Future[Pixels]]]] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ImageBatch:
        while len(self._ahead) <= AHEAD:
            self._ahead.append(self._submit(self.number + len(self._ahead)))
        indices, futures = self._ahead.popleft()
        pixels = [future.result() for future in futures]
        labels = torch.from_numpy(self.images.labels[indices])
        seed = self.batch_seed(self.number)
        self.number += 1
        return ImageBatch(stacked(pixels), labels, seed)

    def _submit(self, number: int) -> tuple[Indices, list[Future[Pixels]]]:
        """Start decoding a batch; return the indices of its images and their futures."""
        indices, copies = self.copies(number)
        passes = number // self.batches_per_pass
        pairs = zip(indices.tolist(), copies.tolist(), strict=True)
        return indices, [
            self._pool.submit(self._crop, index, passes, copy) for index, copy in pairs
        ]

    def _crop(self, index: int, passes: int, copy: int) -> Pixels:
        """Read and crop one image; a random crop follows from seed, pass, index and copy."""
        pixels, size = self.images.pixels(index), self.data.size
        if self.augment.crop is None:
            return centre_crop(pixels, resize=self.data.shorter_side, size=size)
        repeated = () if copy == 0 else (copy,)
        rng = np.random.default_rng(derive_seed(self.seed, "crop", passes, index, *repeated))
        area, ratio = self.augment.crop, self.augment.ratio
        return random_crop(pixels, size=size, area=area, ratio=ratio, rng=rng)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        super().load_state_dict(state)
        self._drop_ahead()

    def close(self) -> None:
        """Cancel decoding and stop the threads."""
        self._drop_ahead()
        self._pool.shutdown()

    def _drop_ahead(self) -> None:
        for _, futures in self._ahead:
            for future in futures:
                future.cancel()
        self._ahead.clear()


class EvaluationImages:
    """Batches with every image once, in a fixed order; the last batch may be smaller.

    Where files are sorted by class, order="stored" gives batches of a single class, which are no
    representative sample for batch statistics and capacities. order="shuffled" permutes the images
    with a fixed seed.
    """

    def __init__(
        self,
        images: ImageSet,
        data: ImageDataConfig,
        *,
        batch: int,
        order: Order = "shuffled",
        seed: int = 0,
        limit: int | None = None,
    ) -> None:
        check(batch >= 1, f"batch={batch} must be 1 or more images")
        check(
            limit is None or limit <= len(images),
            f"limit={limit} exceeds the {len(images):,} images of {images.title}; lower it",
        )
        self.images, self.data, self.batch, self.seed = images, data, batch, seed
        indices = np.arange(len(images))
        if order == "shuffled":
            indices = np.random.default_rng(derive_seed(seed, "order")).permutation(indices)
        self.indices: Indices = indices[:limit]

    @classmethod
    def of(
        cls, images: ImageSet, data: ImageDataConfig, config: ImageEvaluateConfig | AttackConfig
    ) -> Self:
        """Return the batches that an evaluation or an attack asks for."""
        return cls(
            images,
            data,
            batch=config.batch,
            order=config.order,
            seed=config.seed,
            limit=config.limit,
        )

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch)

    def __iter__(self) -> Iterator[ImageBatch]:
        return self.read(range(len(self)))

    def read(self, numbers: range | list[int]) -> Iterator[ImageBatch]:
        """Yield the batches of those numbers, which index the batches of a whole pass."""
        with ThreadPoolExecutor(self.data.threads, thread_name_prefix="images") as pool:
            ahead: deque[list[Future[Pixels]]] = deque()
            for place, number in enumerate(numbers):
                while len(ahead) <= AHEAD and place + len(ahead) < len(numbers):
                    indices = self._indices_of(numbers[place + len(ahead)])
                    ahead.append([pool.submit(self._crop, int(index)) for index in indices])
                try:
                    pixels = [future.result() for future in ahead.popleft()]
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
                labels = torch.from_numpy(self.images.labels[self._indices_of(number)])
                yield ImageBatch(stacked(pixels), labels, derive_seed(self.seed, "batch", number))

    def _indices_of(self, number: int) -> Indices:
        return self.indices[number * self.batch : (number + 1) * self.batch]

    def _crop(self, index: int) -> Pixels:
        pixels = self.images.pixels(index)
        return centre_crop(pixels, resize=self.data.shorter_side, size=self.data.size)


def stacked(pixels: list[Pixels]) -> Tensor:
    """Stack B images (S, S, 3) to a uint8 tensor (B, 3, S, S)."""
    return torch.from_numpy(np.stack(pixels).transpose(0, 3, 1, 2).copy())
