"""Check that what a model computes in an evaluation is finite, before it becomes a figure."""

import contextlib
from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.errors import NonFiniteError

REMEDY = "score another checkpoint, or train again with a lower lr or clip=1.0"


class FiniteLogits:
    """Checks the logits of all batches; only `check` makes the host wait for the device."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []

    def add(self, logits: Tensor) -> None:
        """Record on the device whether the logits of the next batch are finite."""
        self._flags.append(logits.isfinite().all())

    def check(self, of: str, ranks: Ranks = ALONE) -> None:
        """Raise `NonFiniteError`, which names the first bad batch of the data called `of`.

        With several `ranks` each process has checked every size-th batch.
        """
        own = torch.stack(self._flags).tolist() if self._flags else []
        rounds = zip_longest(*ranks.gather(own), fillvalue=True)
        flags = [flag for each in rounds for flag in each]
        if not all(flags):
            raise NonFiniteError(
                f"the model's logits are not all finite in batch {flags.index(False) + 1} of "
                f"{len(flags)} of {of}; {REMEDY}"
            )


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Put `what`, the data and settings of a score, in front of a `NonFiniteError`."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{what}: {error}") from error
