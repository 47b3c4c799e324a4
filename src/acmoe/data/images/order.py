"""The order of images in a training run: which images form which batch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from acmoe.data.images.splits import ImageSet, Indices
from acmoe.data.seeding import derive_seed
from acmoe.data.sharding import check_same_data
from acmoe.errors import check


class Share(NamedTuple):
    """The rows of a batch that one rank takes."""

    rows: Indices
    batch: int  # number of images in the batch, on all ranks together

    @classmethod
    def whole(cls, batch: int) -> "Share":
        """Return the share of a single process."""
        return cls(np.arange(batch), batch)


class ShuffledBatches:
    """Endless shuffled batches of indices; each pass drops the last, incomplete batch.

    A batch follows from the seed and its number alone, so a run can resume at any batch, bit by
    bit. `batch` is the number of images on all ranks together, so a run can also resume on another
    number of ranks. `rows` are the rows of a batch that belong to this rank, those of
    `data.sharding.rank_rows`; None: all of them.

    With `repeats` r, a pass has as many slots as there are images, and r consecutive slots hold the
    same image: a pass reads one image of r, r times each (DeiT's repeated augmentation). The slots
    of a batch are dealt to its r parts in turn, so that copies of an image lie in different
    micro-batches and ranks where there are r or more of them.
    """

    def __init__(
        self,
        images: ImageSet,
        *,
        batch: int,
        seed: int = 0,
        rows: Sequence[int] | None = None,
        repeats: int = 1,
    ) -> None:
        check(batch >= 1, f"batch={batch} must be 1 or more images")
        check(
            batch <= len(images),
            f"batch={batch} exceeds the {len(images):,} training images; lower batch",
        )
        self.images, self.batch, self.seed, self.repeats = images, batch, seed, repeats
        self.batches_per_pass = len(images) // batch
        self.share = Share.whole(batch) if rows is None else Share(np.array(rows), batch)
        self.number = 0  # number of the next batch
        self._order: tuple[int, Indices] | None = None  # number and permutation of the last pass

    def indices(self, number: int) -> Indices:
        """Return the indices of this rank's images in batch `number`."""
        return self.copies(number)[0]

    def copies(self, number: int) -> tuple[Indices, Indices]:
        """Return the indices of this rank's images in batch `number`, and the number of each copy.

        The copies of an image in a pass are numbered from 0 to `repeats` - 1.
        """
        passes, place = divmod(number, self.batches_per_pass)
        if self._order is None or self._order[0] != passes:
            rng = np.random.default_rng(derive_seed(self.seed, "order of pass", passes))
            self._order = (passes, rng.permutation(len(self.images)))
        slots = np.arange(place * self.batch, (place + 1) * self.batch)
        dealt = np.concatenate([slots[part :: self.repeats] for part in range(self.repeats)])
        image, copy = np.divmod(dealt[self.share.rows], self.repeats)
        return self._order[1][image], copy

    def batch_seed(self, number: int) -> int:
        """Seed for later random draws on a batch, such as its augmentation; equal on all ranks."""
        return derive_seed(self.seed, "batch", number, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the number of the next batch, and the settings that its content follows from."""
        return {
            "number": self.number,
            "seed": self.seed,
            "batch": self.batch,
            "images": len(self.images),
            **({} if self.repeats == 1 else {"repeats": self.repeats}),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state of `state_dict`; the images must be the same."""
        saved, current = {"repeats": 1, **state}, {"repeats": 1, **self.state_dict()}
        keys = ("seed", "batch", "images", "repeats")
        check_same_data(saved, current, keys, what="images")
        self.number = state["number"]
