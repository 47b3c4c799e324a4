"""The experts: E two-layer MLPs whose weights stand in one tensor each.

N routed rows, D features, F hidden units, E experts.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from acmoe.errors import check
from acmoe.experts.dispatch import Order, combine, dispatch, sort_by_expert
from acmoe.ops.dispatch import (
    Option,
    choose,
    grouped_mm_obstacle,
    sonicmoe_obstacle,
    triton_obstacle,
)
from acmoe.ops.experts.autograd import expert_mlp
from acmoe.ops.experts.grouped import grouped_linear, grouped_mm
from acmoe.ops.experts.sonicmoe import sonic_mlp
from acmoe.ops.precision import autocast_dtype


def swiglu(h: Tensor) -> Tensor:
    """silu(gate) * up, the two standing side by side."""
    gate, up = h.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "swiglu": swiglu,
}


class ExpertMLP(nn.Module):
    """y = down(dropout(activation(up(x)))) for each expert, over rows sorted by expert."""

    def __init__(
        self,
        *,
        dim: int,
        hidden: int,
        num_experts: int,
        activation: str = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        init: str = "fan_in",
    ) -> None:
        super().__init__()
        check(hidden >= 1, f"hidden={hidden}; it must be at least 1")
        check(0 <= dropout < 1, f"dropout={dropout}; it must lie in [0, 1)")
        check(
            activation in ACTIVATIONS,
            f"activation={activation!r} is unknown; choose one of {', '.join(ACTIVATIONS)}",
        )
        check(
            init in ("fan_in", "published"),
            f"init={init!r} is unknown; choose fan_in or published",
        )
        self.activation = activation
        self.dropout = dropout
        self.init = init
        width = 2 * hidden if activation == "swiglu" else hidden
        self.up = nn.Parameter(torch.empty(num_experts, width, dim))  # swiglu: gate, then up
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.up_bias = nn.Parameter(torch.zeros(num_experts, width)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(num_experts, dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight_EOI in (self.up, self.down):
            _, out, fan_in = weight_EOI.shape
            # The published code let the fan-in of the stacked tensor be out * in: bounds 11 to 19
            # times too small at the paper's sizes. `published` repeats it for comparison.
            fan_in = out * fan_in if self.init == "published" else fan_in
            nn.init.uniform_(weight_EOI, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def forward(self, x_ND: Tensor, order: Order, *, backend: str = "torch") -> Tensor:
        """Rows in, rows out: the definition every backend is compared with."""
        h_NF = linear(x_ND, self.up, self.up_bias, order, backend)
        h_NF = ACTIVATIONS[self.activation](h_NF)
        h_NF = nn.functional.dropout(h_NF, self.dropout, self.training)
        return linear(h_NF, self.down, self.down_bias, order, backend)

    def even(self, x_END: Tensor) -> Tensor:
        """(E, N, D) -> (E, N, D): each expert on N rows of its own; nothing to sort or to count."""
        h_ENF = batched_linear(x_END, self.up, self.up_bias)
        h_ENF = ACTIVATIONS[self.activation](h_ENF)
        h_ENF = nn.functional.dropout(h_ENF, self.dropout, self.training)
        return batched_linear(h_ENF, self.down, self.down_bias)

    def order(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        *,
        complete: bool = False,
        assignment_T1: Tensor | None = None,
        token_mask_T: Tensor | None = None,
    ) -> Order | None:
        """The sort `mix` begins with, for who needs it earlier; None if its backend has its own."""
        x_0D = x_TD[:0]
        dtype = autocast_dtype(x_0D)
        backend = self.backend(x_0D if dtype is None else x_0D.to(dtype), expert_ids_TK, complete)
        if backend == "sonicmoe":
            return None
        return sort_by_expert(
            expert_ids_TK,
            self.up.shape[0],
            backend=backend,
            assignment_T1=assignment_T1,
            token_mask_T=token_mask_T,
        )

    def mix(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        gate_TK: Tensor,
        *,
        complete: bool = False,
        order: Order | None = None,
    ) -> Tensor:
        """(T, D): dispatch, experts and combine, on the fastest backend that can.

        `complete` promises that no id is E, "no expert".
        """
        dtype = autocast_dtype(x_TD)
        x_TD = x_TD if dtype is None else x_TD.to(dtype)
        num_experts = self.up.shape[0]
        backend = self.backend(x_TD, expert_ids_TK, complete)
        if backend == "sonicmoe":
            return sonic_mlp(x_TD, self.up, self.down, expert_ids_TK, gate_TK)
        if order is None:
            order = sort_by_expert(expert_ids_TK, num_experts, backend=backend)
        if backend == "triton":
            return expert_mlp(
                x_TD,
                self.up,
                self.down,
                None if self.up_bias is None else self.up_bias.to(x_TD.dtype),
                None if self.down_bias is None else self.down_bias.to(x_TD.dtype),
                gate_TK,
                order.order,
                order.back,
                order.end,
                order.expert,
                activation=self.activation,
                dropout=self.dropout if self.training else 0.0,
            )
        y_ND = self(dispatch(x_TD, order), order, backend=backend)
        return combine(y_ND, gate_TK, order)

    def backend(self, x_TD: Tensor, expert_ids_TK: Tensor, complete: bool) -> str:
        dropout = self.dropout if self.training else 0.0
        has_bias = self.up_bias is not None
        empty = "there are no tokens" if expert_ids_TK.numel() == 0 else None
        partial = None if complete else "it has no rows without an expert"
        widths = (self.up.shape[1], self.up.shape[2], self.down.shape[2])
        return choose(
            "experts",
            (
                Option("triton", empty or triton_obstacle(x_TD)),
                Option("grouped_mm", empty or grouped_mm_obstacle(x_TD, *widths)),
                Option("torch", None),
                Option(
                    "sonicmoe",
                    empty or partial or sonicmoe_obstacle(x_TD, self.activation, has_bias, dropout),
                ),
            ),
        )


def batched_linear(x_ENI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None) -> Tensor:
    """(E, N, O): every expert's rows times its own weight, in one product."""
    weight_EIO = weight_EOI.to(x_ENI.dtype).mT
    if bias_EO is None:
        return x_ENI @ weight_EIO
    return torch.baddbmm(bias_EO.to(x_ENI.dtype)[:, None], x_ENI, weight_EIO)


def linear(
    x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, order: Order, backend: str
) -> Tensor:
    weight_EOI = weight_EOI.to(x_NI.dtype)  # under autocast tokens are bf16 and weights float32
    product = grouped_mm if backend == "grouped_mm" else grouped_linear
    y_NO = product(x_NI, weight_EOI, order.end)
    if bias_EO is None:
        return y_NO
    # A one-hot product instead of bias[expert]: its backward sums rows in a fixed order, where an
    # indexed gradient would scatter. The row of zeros of "no expert" keeps such rows zero.
    ids_E = torch.arange(bias_EO.shape[0], device=x_NI.device)
    one_hot_NE = (order.expert[:, None] == ids_E).to(y_NO.dtype)
    return torch.addmm(y_NO, one_hot_NE, bias_EO.to(y_NO.dtype))
