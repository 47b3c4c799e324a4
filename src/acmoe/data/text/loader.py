"""Loaders that cut a token stream into blocks of B rows and L positions.

Shape letters: B rows (of this rank), L positions of a block, N tokens of the stream.

A stream is cut into contiguous rows that are read left to right, so that a model can carry its
memory from one block to the next; `Batch.reset` tells when it must start without memory. Ranks get
consecutive rows: the blocks of all ranks, stacked, are the blocks of a single process.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from acmoe.data.seeding import derive_seed
from acmoe.data.sharding import check_same_data, rank_rows
from acmoe.data.text.arrays import Tokens
from acmoe.errors import check

IGNORED = -100  # target of padding: the default ignore_index of cross_entropy, never a token id


class Batch(NamedTuple):
    """One block: `targets[b, l]` is the token that follows `tokens[b, l]`.

    `token_mask` is False where a row has ended; None: every position counts. With `reset`, this
    block does not continue the previous one, so the model must drop its memory.
    """

    tokens: Tensor
    targets: Tensor
    reset: bool
    token_mask: Tensor | None = None


class TrainingBatches:
    """An endless iterator over the blocks of a training stream, resumable bit by bit.

    The first B * (N // B) tokens of the stream form B rows of equal length. A pass reads whole
    blocks from an offset to the end of the rows. The first pass starts at offset 0, each later one
    at a random offset of less than one block, so that the boundaries between blocks move. Each pass
    begins with `reset`. The offsets follow from the seed.

    `batch` is the number of rows on all ranks together, so a run can resume on another number of
    ranks. With `split` micro-batches, a rank has rows of each (`rank_rows`).
    """

    def __init__(
        self,
        stream: Tokens,
        *,
        batch: int,
        block: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        split: int = 1,
    ) -> None:
        check(block >= 1, f"block={block} must be 1 or more tokens")
        self.stream, self.batch, self.block, self.seed = stream, batch, block, seed
        self.row_length = len(stream) // max(batch, 1)
        check(
            self.row_length > block,
            f"{len(stream):,} tokens make {batch} rows of {self.row_length}; a block of {block}"
            " and its next token do not fit: lower batch or block",
        )
        self.rows = rank_rows(batch, rank=rank, world_size=world_size, unit="rows", split=split)
        self.passes, self.position, self.reset = 0, 0, True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        reset = self.reset
        window_BL = np.empty((len(self.rows), self.block + 1), dtype=np.int64)
        for line, row in zip(window_BL, self.rows, strict=True):
            start = row * self.row_length + self.position
            line[:] = self.stream[start : start + self.block + 1]
        self._advance()
        window = torch.from_numpy(window_BL)
        return Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous(), reset)

    def _advance(self) -> None:
        self.position += self.block
        self.reset = self.position + self.block + 1 > self.row_length
        if self.reset:
            self.passes += 1
            # A block must still fit after the offset, which matters only for very short rows.
            offsets = min(self.block, self.row_length - self.block)
            self.position = derive_seed(self.seed, "offset of pass", self.passes) % offsets

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next block; random offsets follow from seed and pass."""
        return {
            "passes": self.passes,
            "position": self.position,
            "reset": int(self.reset),
            "seed": self.seed,
            "batch": self.batch,
            "block": self.block,
            "tokens": len(self.stream),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state of `state_dict`; stream, batch and block must be the same."""
        keys = ("seed", "batch", "block", "tokens")
        check_same_data(state, self.state_dict(), keys, what="data")
        self.passes, self.position = state["passes"], state["position"]
        self.reset = bool(state["reset"])


class EvaluationBatches:
    """Blocks that score every token of a stream, except the first, exactly once.

    A stream of N tokens has N - 1 predictions, token i -> token i + 1. They are cut into `batch`
    contiguous rows whose lengths differ by at most one; the last target of a row is the first
    input of the next. Each row starts without memory, so fewer rows mean more context. Rows that
    have ended are padded with token 0, target `IGNORED` and `token_mask` False; all ranks have the
    same number of blocks.

    `targets` may be another stream of the same length, such as the clean text of a corrupted input.
    """

    def __init__(
        self,
        stream: Tokens,
        *,
        batch: int,
        block: int,
        targets: Tokens | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check(block >= 1, f"block={block} must be 1 or more tokens")
        self.stream, self.block = stream, block
        self.targets = stream if targets is None else targets
        check(
            len(self.targets) == len(stream),
            f"{len(self.targets):,} targets for {len(stream):,} tokens; the lengths must agree",
        )
        self.predictions = len(stream) - 1
        check(
            self.predictions >= batch,
            f"{len(stream):,} tokens give {self.predictions} predictions, fewer than"
            f" batch={batch} rows: lower batch",
        )
        rows = rank_rows(batch, rank=rank, world_size=world_size, unit="rows")
        short, longer = divmod(self.predictions, batch)
        starts = [row * short + min(row, longer) for row in (*rows, rows[-1] + 1)]
        self.spans = list(pairwise(starts))
        self.longest = short + (longer > 0)

    def __len__(self) -> int:
        return -(-self.longest // self.block)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            yield self._block(number)

    def _block(self, number: int) -> Batch:
        shape = (len(self.spans), self.block)
        tokens_BL = np.zeros(shape, dtype=np.int64)
        targets_BL = np.full(shape, IGNORED, dtype=np.int64)
        mask_BL = np.zeros(shape, dtype=np.bool_)
        for row, (start, stop) in enumerate(self.spans):
            first = start + number * self.block
            last = min(first + self.block, stop)
            tokens_BL[row, : last - first] = self.stream[first:last]
            targets_BL[row, : last - first] = self.targets[first + 1 : last + 1]
            mask_BL[row, : last - first] = True
        return Batch(
            torch.from_numpy(tokens_BL),
            torch.from_numpy(targets_BL),
            number == 0,
            torch.from_numpy(mask_BL),
        )
