"""Calls of each GEMM of an expert layer on given tensors, as ops/experts/triton/launched.py has it.

The tuning at first use times them, and so does `acmoe bench tune`.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token, N rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from acmoe.ops.experts.tune.inputs import Inputs, drawn, plan_of

Call = Callable[[], tuple[Tensor, ...]]


def forward_calls(given: Inputs, generator: torch.Generator | None = None) -> dict[str, Call]:
    """Return the GEMMs of the forward; "up" includes the copy of x, where one is made.

    generator: draws the operands that the layer would compute.
    """
    from acmoe.ops.experts.hopper import choice
    from acmoe.ops.experts.triton import launch

    size, plan, seed = plan_of(given)
    a_NF = drawn(given, size.hidden, generator)

    def up() -> tuple[Tensor, ...]:
        tokens = choice.row_operand_for("up", given.x, given.rows.inverse, size)
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
    from acmoe.ops.experts.triton.backward_calls import Backward

    calls = Backward(given, generator)
    return {
        "hidden": calls.hidden,
        "down_weight": calls.down_weight,
        "up_weight": calls.up_weight,
        "input": calls.input,
    }
