"""The tensors of a call of the experts, on which a tuner times the GEMMs.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token, N rows.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from acmoe.ops.experts.triton.sizes import Sizes, sizes_of
from acmoe.ops.sort.reference import Rows

if TYPE_CHECKING:
    from acmoe.ops.experts.triton.tiles import Plan


class Inputs(NamedTuple):
    """The tensors of one call of the experts, without gradients."""

    x: Tensor  # (T, D)
    up: Tensor  # (E, W, D) in the dtype of x
    down: Tensor  # (E, D, F)
    up_bias: Tensor | None
    down_bias: Tensor | None
    gate: Tensor  # (T, K)
    rows: Rows
    act: str
    result: torch.dtype  # dtype of the weight gradients, that of the parameters

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.x, self.down, self.gate, self.act)


def plan_of(given: Inputs) -> "tuple[Sizes, Plan, Tensor]":
    """Return the sizes, the tiles, and a seed that is not read."""
    from acmoe.ops.experts.triton.tiles import Plan

    plan = Plan(given.rows.permutation, given.rows.offsets, given.gate.shape[1])
    return given.sizes, plan, given.rows.offsets


def drawn(given: Inputs, width: int, generator: torch.Generator | None) -> Tensor:
    """Return random rows (N, width): the clock rate under load depends on the numbers."""
    shape = (given.rows.permutation.numel(), width)
    return torch.randn(shape, generator=generator, device=given.x.device, dtype=given.x.dtype)
