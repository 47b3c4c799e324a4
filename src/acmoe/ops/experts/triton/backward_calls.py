"""The GEMMs of a backward of the experts, one call each (`backward_calls`).

D features, F hidden units, W = F or 2F, T tokens, N rows.
"""

import torch
from torch import Tensor

from acmoe.ops.experts.hopper.choice import gathers, row_operand_for, run_rows
from acmoe.ops.experts.triton.launched import (
    down_weight_gradient,
    hidden_gradients,
    up_weight_gradient,
)
from acmoe.ops.experts.triton.sizes import Operands, RowOperand
from acmoe.ops.experts.tune.inputs import Inputs, drawn, plan_of


class Backward:
    """A backward whose upstream gradient and hidden units are drawn at random."""

    def __init__(self, given: Inputs, generator: torch.Generator | None) -> None:
        x = given.x
        self.x, self.up, self.inverse = x, given.up, given.rows.inverse
        self.size, self.plan, seed = plan_of(given)
        self.operands = Operands(*given[:6], *given.rows[:4], seed)
        self.result = given.result
        self.grad_TD = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        self.a_NF = drawn(given, self.size.hidden, generator)
        self.h_NW = drawn(given, self.size.width, generator)
        self.dh_NW = torch.empty_like(self.h_NW)
        self._upstream: dict[bool, RowOperand] = {}  # operands of `down_weight` by `gather`

    def hidden(self) -> tuple[Tensor, ...]:
        """Return gate * a (N, F), dh (N, W), and the gradients of the gate and the biases."""
        a_NF, *sums = hidden_gradients(
            *(self.grad_TD, self._read_upstream(), self.operands, self.h_NW, self.dh_NW),
            *(self.plan, self.size, 0.0),
        )
        return (a_NF, self.dh_NW, *sums)

    def down_weight(self) -> tuple[Tensor, ...]:
        """Return the gradient of the down weights; only the first call copies the upstream one."""
        gather = gathers("hidden", self.size, self.x.dtype, self.x.device)
        if gather not in self._upstream:
            self._upstream[gather] = self._read_upstream()
        upstream = self._upstream[gather]
        return (down_weight_gradient(upstream, self.a_NF, self.plan, self.size, self.result),)

    def up_weight(self) -> tuple[Tensor, ...]:
        """Return the gradient of the up weights."""
        rows = self.h_NW, self.x, self.inverse
        return (up_weight_gradient(*rows, self.plan, self.size, self.result),)

    def input(self) -> tuple[Tensor, ...]:
        """Return the gradient (N, D) of the rows of x."""
        return (run_rows("input", self.h_NW, self.up, None, self.plan, self.size, across=True),)

    def _read_upstream(self) -> RowOperand:
        return row_operand_for("hidden", self.grad_TD, self.inverse, self.size)
