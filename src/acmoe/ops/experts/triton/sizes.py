"""What the launches of the expert kernels hand to each other: sizes, rows, sums to be added up.

T tokens, N rows, D features, F hidden units, W = F or 2F.
"""

from typing import NamedTuple

from torch import Tensor


class Sizes(NamedTuple):
    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    act: str

    @property
    def width(self) -> int:
        return 2 * self.hidden if self.act == "swiglu" else self.hidden


def sizes_of(x: Tensor, down: Tensor, gate: Tensor, act: str) -> Sizes:
    return Sizes(x.shape[0], x.shape[1], down.shape[2], down.shape[0], gate.shape[1], act)


class Source(NamedTuple):
    """What stands at each routed row: rows (N, D) in sorted order, or tokens (T, D) to gather."""

    values: Tensor
    gather: bool


class Sums(NamedTuple):
    """Columns of which biases get their gradients: W, or 0 for no first bias, and D, or 0."""

    up: int
    down: int


class Shares(NamedTuple):
    """What the tiles of the activation's backward leave to be added up."""

    gate: Tensor  # (B, N) of each row, by blocks of hidden units
    bias: Tensor  # (tiles, columns) of each tile
