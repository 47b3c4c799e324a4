"""Tuples that the launches of the expert kernels pass to each other.

T tokens, K experts per token, N = T * K rows, D features, F hidden units, W = 2F for swiglu, else
F.
"""

from typing import NamedTuple

from torch import Tensor


class Sizes(NamedTuple):
    """The sizes of a layer of experts: T, D, F, E, K, and the activation."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    act: str

    @property
    def width(self) -> int:
        """Return W, the rows of an expert's up weight."""
        return 2 * self.hidden if self.act == "swiglu" else self.hidden


def sizes_of(x: Tensor, down: Tensor, gate: Tensor, act: str) -> Sizes:
    """Return the sizes of a call with x (T, D), down (E, D, F) and gate (T, K)."""
    return Sizes(x.shape[0], x.shape[1], down.shape[2], down.shape[0], gate.shape[1], act)


class RowOperand(NamedTuple):
    """Row operand of a grouped GEMM: rows (N, D) in sorted order, or, to gather, tokens (T, D)."""

    values: Tensor
    gather: bool


class Sums(NamedTuple):
    """Columns of the bias gradients: W for up and D for down, or 0 where there is no bias."""

    up: int
    down: int


class Partials(NamedTuple):
    """Partial sums that the tiles of the activation's backward write; `run_reduce_partials` adds
    them up."""

    gate: Tensor  # (B, N) gate gradient of each row, by block of hidden units
    bias: Tensor  # (tiles, up + down columns of `Sums`) bias gradients of each row tile
