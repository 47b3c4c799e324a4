"""Calls of each GEMM of an expert layer on given tensors, as ops/experts/triton/launched.py has it.

The tuning at first use times them, and so does `acmoe bench tune`.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token, N rows.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from acmoe.ops.experts.triton.sizes import RowOperand, Sizes, Sums, sizes_of
from acmoe.ops.sort.reference import Rows

if TYPE_CHECKING:
    from acmoe.ops.experts.triton.tiles import Plan

Call = Callable[[], tuple[Tensor, ...]]


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
    result: torch.dtype  # of the weight gradients, the dtype of the parameters

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.x, self.down, self.gate, self.act)


def forward_calls(given: Inputs, generator: torch.Generator | None = None) -> dict[str, Call]:
    """Return the GEMMs of the forward; "up" includes the copy of x, where one is made.

    generator: draws the operands that the layer would compute.
    """
    from acmoe.ops.experts.hopper import choice
    from acmoe.ops.experts.triton import launch
    from acmoe.ops.experts.triton.tokens import row_operand

    size, plan, seed = _plan(given)
    a_NF = _drawn(given, size.hidden, generator)

    def up() -> tuple[Tensor, ...]:
        gather = choice.gathers("up", size, given.x.dtype, given.x.device)
        tokens = row_operand(given.x, given.rows.inverse, size, gather=gather)
        return launch.run_up(tokens, given.up, given.up_bias, plan, size, 0.0, seed)

    def down() -> tuple[Tensor, ...]:
        return (choice.run_rows("down", a_NF, given.down, given.down_bias, plan, size),)

    return {"up": up, "down": down}


def backward_calls(given: Inputs, generator: torch.Generator | None = None) -> dict[str, Call]:
    """Return the GEMMs of the backward; generator as in `forward_calls`.

    "hidden" includes the copy of the upstream gradient, where one is made, the activation, and the
    sums for the gate and the biases; "down_weight" reads the same copy. "up_weight" includes the
    copy of x.
    """
    from acmoe.ops.experts.hopper import choice
    from acmoe.ops.experts.triton.launch import run_reduce_partials
    from acmoe.ops.experts.triton.tokens import row_operand

    size, plan, seed = _plan(given)
    dtype, device = given.x.dtype, given.x.device
    grad_TD = torch.randn(given.x.shape, generator=generator, device=device, dtype=dtype)
    a_NF, h_NW = (_drawn(given, width, generator) for width in (size.hidden, size.width))
    dh_NW = torch.empty_like(h_NW)
    sums = Sums(
        *(0 if bias is None else bias.shape[1] for bias in (given.up_bias, given.down_bias))
    )

    def upstream() -> RowOperand:
        gather = choice.gathers("hidden", size, dtype, device)
        return row_operand(grad_TD, given.rows.inverse, size, gather=gather)

    def hidden() -> tuple[Tensor, ...]:
        by_bias = None if given.down_bias is None else grad_TD @ given.down_bias.T
        a, shares = choice.run_hidden(
            *(upstream(), given.down, h_NW, dh_NW, given.gate, grad_TD),
            *(plan, size, sums, 0.0, seed),
        )
        return (
            a,
            dh_NW,
            *run_reduce_partials(shares, by_bias, given.rows.expert, plan, size, sums, dtype),
        )

    copies: dict[bool, RowOperand] = {}

    def down_weight() -> tuple[Tensor, ...]:
        gather = choice.gathers("hidden", size, dtype, device)
        rows = copies[gather] if gather in copies else copies.setdefault(gather, upstream())
        how = "p" if rows.gather else "none"
        return (
            choice.run_weight(
                "down_weight", rows.values, a_NF, plan, size, gather=how, dtype=given.result
            ),
        )

    def up_weight() -> tuple[Tensor, ...]:
        gather = choice.gathers("up_weight", size, dtype, device, result=given.result)
        tokens = row_operand(given.x, given.rows.inverse, size, gather=gather)
        how = "q" if tokens.gather else "none"
        return (
            choice.run_weight(
                "up_weight", h_NW, tokens.values, plan, size, gather=how, dtype=given.result
            ),
        )

    def by_input() -> tuple[Tensor, ...]:
        return (choice.run_rows("input", h_NW, given.up, None, plan, size, across=True),)

    return {
        "hidden": hidden,
        "down_weight": down_weight,
        "up_weight": up_weight,
        "input": by_input,
    }


def _plan(given: Inputs) -> "tuple[Sizes, Plan, Tensor]":
    """Return the sizes, the tiles, and a seed that is not read."""
    from acmoe.ops.experts.triton.tiles import Plan

    plan = Plan(given.rows.permutation, given.rows.offsets, given.gate.shape[1])
    return given.sizes, plan, given.rows.offsets


def _drawn(given: Inputs, width: int, generator: torch.Generator | None) -> Tensor:
    """Return random rows (N, width): the clock rate under load depends on the numbers."""
    shape = (given.rows.permutation.numel(), width)
    return torch.randn(shape, generator=generator, device=given.x.device, dtype=given.x.dtype)
