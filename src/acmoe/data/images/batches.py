"""Image sets -> batches, decoded ahead by threads, the same for the same seed.

B images of a batch (of this rank), S side in pixels.

What is random about a batch follows from the seed and its number alone: neither the number of
threads nor what they decoded ahead matters.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from acmoe.config.images.data import AugmentConfig, ImageDataConfig, Order
from acmoe.data.images.order import ShuffledBatches
from acmoe.data.images.pixels import Pixels, centre_crop, random_crop
from acmoe.data.images.splits import ImageSet, Indices
from acmoe.data.seeding import derive_seed
from acmoe.errors import check

AHEAD = 2  # batches decoded while the model works


class ImageBatch(NamedTuple):
    images: Tensor  # (B, 3, S, S) uint8
    labels: Tensor  # (B,) int64
    seed: int  # of whatever is drawn for this batch later on, such as its augmentation


class TrainingImages(ShuffledBatches):
    """Endless shuffled batches, decoded and cropped by threads."""

    def __init__(
        self,
        images: ImageSet,
        data: ImageDataConfig,
        augment: AugmentConfig,
        *,
        batch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(images, batch=batch, seed=seed, rank=rank, world_size=world_size)
        self.data, self.augment = data, augment
        self._pool = ThreadPoolExecutor(data.threads, thread_name_prefix="images")
        self._ahead: deque[tuple[Indices, list[Future[Pixels]]]] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ImageBatch:
        while len(self._ahead) <= AHEAD:
            self._ahead.append(self._begin(self.number + len(self._ahead)))
        own, futures = self._ahead.popleft()
        pixels = [future.result() for future in futures]
        labels = torch.from_numpy(self.images.labels[own])
        seed = self.batch_seed(self.number)
        self.number += 1
        return ImageBatch(stacked(pixels), labels, seed)

    def _begin(self, number: int) -> tuple[Indices, list[Future[Pixels]]]:
        own, passes = self.indices(number), number // self.batches_per_pass
        return own, [self._pool.submit(self._crop, int(index), passes) for index in own]

    def _crop(self, index: int, passes: int) -> Pixels:
        pixels, size = self.images.pixels(index), self.data.size
        if self.augment.crop is None:
            return centre_crop(pixels, resize=self.data.shorter_side, size=size)
        rng = np.random.default_rng(derive_seed(self.seed, "crop", passes, index))
        area, ratio = self.augment.crop, self.augment.ratio
        return random_crop(pixels, size=size, area=area, ratio=ratio, rng=rng)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        super().load_state_dict(state)
        self._drop_ahead()

    def close(self) -> None:
        """Stop decoding ahead."""
        self._drop_ahead()
        self._pool.shutdown()

    def _drop_ahead(self) -> None:
        for _, futures in self._ahead:
            for future in futures:
                future.cancel()
        self._ahead.clear()


class EvaluationImages:
    """Every image once, in a fixed order; the last batch may be smaller.

    Where files lie sorted by class, `stored` gives batches of one class, which is no fair sample
    for batch statistics and capacities; `shuffled` mixes them by a fixed seed.
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

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch)

    def __iter__(self) -> Iterator[ImageBatch]:
        return self.read(range(len(self)))

    def read(self, numbers: range | list[int]) -> Iterator[ImageBatch]:
        """The batches of those numbers."""
        with ThreadPoolExecutor(self.data.threads, thread_name_prefix="images") as pool:
            ahead: deque[list[Future[Pixels]]] = deque()
            for place, number in enumerate(numbers):
                while len(ahead) <= AHEAD and place + len(ahead) < len(numbers):
                    own = self._own(numbers[place + len(ahead)])
                    ahead.append([pool.submit(self._crop, int(index)) for index in own])
                try:
                    pixels = [future.result() for future in ahead.popleft()]
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
                labels = torch.from_numpy(self.images.labels[self._own(number)])
                yield ImageBatch(stacked(pixels), labels, derive_seed(self.seed, "batch", number))

    def _own(self, number: int) -> Indices:
        return self.indices[number * self.batch : (number + 1) * self.batch]

    def _crop(self, index: int) -> Pixels:
        pixels = self.images.pixels(index)
        return centre_crop(pixels, resize=self.data.shorter_side, size=self.data.size)


def stacked(pixels: list[Pixels]) -> Tensor:
    """(B, 3, S, S) uint8."""
    return torch.from_numpy(np.stack(pixels).transpose(0, 3, 1, 2).copy())
