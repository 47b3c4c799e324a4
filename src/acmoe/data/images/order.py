"""Which images make up which batch of a training run."""

from collections.abc import Mapping

import numpy as np

from acmoe.data.images.splits import ImageSet, Indices
from acmoe.data.seeding import derive_seed
from acmoe.errors import check


class ShuffledBatches:
    """Endless batches; each pass over the images leaves out what fills no whole batch.

    What is random about a batch follows from the seed and its number alone, so a run resumes at any
    batch bit by bit. `batch` counts the images of all ranks together, so it may do so on another
    number of them.
    """

    def __init__(
        self, images: ImageSet, *, batch: int, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        check(batch >= 1, f"batch={batch} must be 1 or more images")
        check(0 <= rank < world_size, f"rank={rank} must lie below world_size={world_size}")
        check(
            batch % world_size == 0,
            f"batch={batch} images cannot be dealt to world_size={world_size} ranks; use a "
            "multiple",
        )
        check(
            batch <= len(images),
            f"batch={batch} exceeds the {len(images):,} training images; lower batch",
        )
        self.images, self.batch, self.seed = images, batch, seed
        self.batches_per_pass = len(images) // batch
        local = batch // world_size
        self.rank, self.own = rank, slice(rank * local, (rank + 1) * local)
        self.number = 0  # batches delivered so far
        self._order: tuple[int, Indices] | None = None  # pass, and its order

    def indices(self, number: int) -> Indices:
        """The images of this rank in a batch."""
        passes, place = divmod(number, self.batches_per_pass)
        if self._order is None or self._order[0] != passes:
            rng = np.random.default_rng(derive_seed(self.seed, "order of pass", passes))
            self._order = (passes, rng.permutation(len(self.images)))
        whole = self._order[1][place * self.batch : (place + 1) * self.batch]
        return whole[self.own]

    def batch_seed(self, number: int) -> int:
        """Of whatever is drawn for a batch later on, such as its augmentation."""
        return derive_seed(self.seed, "batch", number, self.rank)

    def state_dict(self) -> dict[str, int]:
        """Which batch comes next, and what its content follows from."""
        return {
            "number": self.number,
            "seed": self.seed,
            "batch": self.batch,
            "images": len(self.images),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was taken; the images must be the same."""
        own = self.state_dict()
        for key in ("seed", "batch", "images"):
            check(
                state[key] == own[key],
                f"the saved run read its images with {key}={state[key]}, this one with"
                f" {key}={own[key]}; use the same",
            )
        self.number = state["number"]
