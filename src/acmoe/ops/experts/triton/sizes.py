"""Tuples that the launches of the expert kernels pass to each other.

T tokens, K experts per token, N = T * K rows, D features, F hidden units, W = 2F for swiglu, else
F, E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.ops.experts.settings.rules import Layer


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

    def layer(self, dtype: torch.dtype) -> Layer:
        """Return what the settings of this layer's GEMMs depend on.

        The rows of an average expert are rounded up to a power of two, so that batches of nearly
        the same size share their settings and compiled kernels.
        """
        rows = -(-self.tokens * self.top_k // self.experts)
        rounded = 1 << max(rows - 1, 0).bit_length()
        return Layer(self.dim, self.hidden, self.experts, self.width, rounded, dtype)


def sizes_of(x: Tensor, down: Tensor, gate: Tensor, act: str) -> Sizes:
    """Return the sizes of a call with x (T, D), down (E, D, F) and gate (T, K)."""
    return Sizes(x.shape[0], x.shape[1], down.shape[2], down.shape[0], gate.shape[1], act)


class Operands(NamedTuple):
    """The tensors that forward and backward read, in the order of the custom ops' arguments."""

    x: Tensor  # (T, D)
    up: Tensor  # (E, W, D) in the dtype of x
    down: Tensor  # (E, D, F) in the dtype of x
    up_bias: Tensor | None  # (E, W)
    down_bias: Tensor | None  # (E, D)
    gate: Tensor  # (T, K)
    permutation: Tensor  # (N,) choice t * K + k of each sorted row
    inverse: Tensor  # (N,) sorted row of each choice
    offsets: Tensor  # (E,) end of each expert's rows
    expert: Tensor  # (N,) expert of each sorted row
    seed: Tensor  # (1,) seed of dropout; any tensor where there is none


class GradientOptions(NamedTuple):
    """The options of a backward."""

    act: str
    dropout: float
    dtype: torch.dtype  # dtype of the gradients of up and down
    needs_up: bool  # False: the gradient of up is empty
    needs_down: bool


class RowOperand(NamedTuple):
    """Row operand of a grouped GEMM: rows (N, D) in sorted order, or, to gather, tokens (T, D)."""

    values: Tensor
    gather: bool


class Sums(NamedTuple):
    """Columns of the bias gradients: W for up and D for down, or 0 where there is no bias."""

    up: int
    down: int


class HiddenInputs(NamedTuple):
    """The inputs and the output of the activation's backward, beside da = grad @ down."""

    h: Tensor  # (N, W) hidden units before the activation
    dh: Tensor  # (N, W) buffer for their gradient; it may be h itself
    gate: Tensor  # (T, K)
    grad: Tensor  # (T, D) gradient of the layer's outputs
    sums: Sums
    dropout: float
    seed: Tensor  # (1,) seed of dropout; any tensor where there is none


class Partials(NamedTuple):
    """Partial sums that the tiles of the activation's backward write; `run_reduce_partials` adds
    them up."""

    gate: Tensor  # (B, N) gate gradient of each row, by block of hidden units
    bias: Tensor  # (tiles, up + down columns of `Sums`) bias gradients of each row tile
