"""The experts: E two-layer MLPs, with the weights of all experts stacked in one tensor.

T tokens, K experts per token, D features, F hidden units, E experts.
"""

import math

import torch
from torch import Tensor, nn

from acmoe.errors import UserError, check
from acmoe.ops.checks import check_whole
from acmoe.ops.experts import ExpertWeights, expert_mlp
from acmoe.ops.experts.reference import ACTIVATIONS
from acmoe.ops.precision import autocast_dtype
from acmoe.ops.sort import Rows


class ExpertMLP(nn.Module):
    """y = down(dropout(activation(up(x)))) for each expert."""

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
        check_whole(hidden, "hidden")
        check(hasattr(dropout, "__float__"), f"dropout={dropout!r}; it must be a number")
        check(0 <= dropout < 1, f"dropout={dropout}; it must lie in [0, 1)")
        check(bias in (True, False), f"bias={bias!r}; it must be true or false")
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
        self.up = nn.Parameter(
            torch.empty(num_experts, width, dim)
        )  # swiglu: rows of the gate, then of up
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.up_bias = nn.Parameter(torch.zeros(num_experts, width)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(num_experts, dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew and set the biases to 0."""
        for bias in (self.up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for weight_EOI in (self.up, self.down):
            _, out, fan_in = weight_EOI.shape
            # The published code took out * in for the fan-in of the stacked tensor, so its bounds
            # are 11 to 19 times too small at the paper's sizes. `published` does so too, for
            # comparison.
            fan_in = out * fan_in if self.init == "published" else fan_in
            nn.init.uniform_(weight_EOI, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def forward(
        self,
        x: Tensor,
        rows: Rows | None = None,
        gate_TK: Tensor | None = None,
        *,
        complete: bool = False,
    ) -> Tensor:
        """Return (T, D): the sum of each token's expert outputs, weighted by its gate.

        x: (T, D) tokens. Without rows and gate it is (E, N, D), and so is the result: expert e is
        applied to the N rows x[e] (SoftMoE). complete: the caller guarantees that every row has an
        expert. Under autocast the GEMMs run in its dtype.
        """
        check((rows is None) == (gate_TK is None), "give rows and gate_TK together, or neither")
        if rows is None or gate_TK is None:
            return self._even(x)
        if rows.offsets.shape[0] != self.up.shape[0]:
            raise UserError(
                f"rows are sorted by {rows.offsets.shape[0]} experts, and there are weights of "
                f"{self.up.shape[0]}; give the layer (num_experts), its router and its experts the "
                "same number"
            )
        dtype = autocast_dtype(x)
        return expert_mlp(
            x if dtype is None else x.to(dtype),
            ExpertWeights(self.up, self.down, self.up_bias, self.down_bias),
            rows,
            gate_TK,
            activation=self.activation,
            dropout=self.dropout if self.training else 0.0,
            complete=complete,
        )

    def _even(self, x_END: Tensor) -> Tensor:
        """Apply expert e to the N rows x_END[e]; return (E, N, D). No sort is needed."""
        h_ENF = batched_linear(x_END, self.up, self.up_bias)
        h_ENF = ACTIVATIONS[self.activation](h_ENF)
        h_ENF = nn.functional.dropout(h_ENF, self.dropout, self.training)
        return batched_linear(h_ENF, self.down, self.down_bias)


def batched_linear(x_ENI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None) -> Tensor:
    """Return (E, N, O): every expert's rows times its own weight, in one batched GEMM."""
    weight_EIO = weight_EOI.to(x_ENI.dtype).mT
    if bias_EO is None:
        return x_ENI @ weight_EIO
    return torch.baddbmm(bias_EO.to(x_ENI.dtype)[:, None], x_ENI, weight_EIO)


def shaped_as(x: Tensor, y: Tensor) -> Tensor:
    """Return y in the shape of x. Nobody else may use y: autograd takes the result for its own.

    `y.view` would return a view. FSDP2 hooks the outputs of a module, warns of views among them,
    and loses its hook where a residual is added in place: the backward then fails.
    """
    if y.dim() == x.dim():
        return y
    if torch.compiler.is_compiling():
        return y.view(x.shape)
    own: Tensor = torch.ops.aten._unsafe_view(y, x.shape)
    return own
