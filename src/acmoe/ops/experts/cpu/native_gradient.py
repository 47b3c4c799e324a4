"""The experts in C with gradients, for few rows of small experts: one autograd function.

The function is that of gradient.py with products in C. A backward that is batched, traced or
differentiated in turn runs there.

T tokens, K experts per token, N = T * K rows, D features, F hidden units, W = F (or 2F for swiglu),
E experts.
"""

import torch
from torch import Tensor

from acmoe.ops.experts.cpu.gradient import Saved, by_definition, gradients, through_activation
from acmoe.ops.experts.cpu.native_products import (
    NotServedError,
    gradient_of_swiglu,
    gradients_of_sum,
    gradients_of_weights,
    hidden_units,
    rows_through_weights,
    rows_times_weights,
    sum_of_choices,
)
from acmoe.ops.experts.reference import ExpertWeights, dispatch
from acmoe.ops.grad_mode import is_batched
from acmoe.ops.native.library import unsupported
from acmoe.ops.once import apply, as_saved
from acmoe.ops.sort.reference import Rows


def expert_mlp_in_c_with_gradient(
    x: Tensor, weights: ExpertWeights, rows: Rows, gate: Tensor, activation: str
) -> Tensor:
    """Compute `expert_mlp`, (T, D); raise NotServedError where C refuses it."""
    found: Tensor = apply(_Experts, dispatch(x, rows), gate, *weights, rows, activation)
    return found


class _Experts(torch.autograd.Function):
    """Compute the sum over each token's experts from gathered rows."""

    @staticmethod
    def forward(ctx, x, gate, up, down, up_bias, down_bias, rows, activation):  # type: ignore[no-untyped-def]
        relu = activation == "relu"
        before_NW = rows_times_weights(x, up, up_bias, rows, relu=relu)
        hidden_NF = hidden_units(before_NW, activation)
        y_ND = rows_times_weights(hidden_NF, down, down_bias, rows, relu=False)
        y_TD = sum_of_choices(y_ND, rows.inverse, gate)
        ctx.activation = activation
        before = None if relu else before_NW
        ctx.save_for_backward(
            *(x, gate, up, down, up_bias, down_bias, before, hidden_NF, y_ND), *rows
        )
        return y_TD

    @staticmethod
    def backward(ctx, grad_TD):  # type: ignore[no-untyped-def]
        saved = Saved(*ctx.saved_tensors)
        needed = ctx.needs_input_grad[:6]
        run = by_definition if torch.is_grad_enabled() else _gradients
        return *run(saved, needed, grad_TD, ctx.activation), None, None


def _gradients(
    given: Saved, needed: tuple[bool, ...], grad_TD: Tensor, activation: str
) -> list[Tensor | None]:
    """Compute `gradients` of gradient.py, in C where it serves."""
    if not is_batched(grad_TD):
        saved, grad = Saved(*as_saved(given)), grad_TD.contiguous()
        if unsupported(grad, *saved[:9]) is None:
            try:
                return _in_c(saved, needed, grad, activation)
            except NotServedError:  # hooks on saved tensors brought other rows back
                pass
    return gradients(given, needed, grad_TD, activation)


def _in_c(
    saved: Saved, needed: tuple[bool, ...], grad_TD: Tensor, activation: str
) -> list[Tensor | None]:
    """Return the gradients of x, gate, weights and biases; None where one is not needed."""
    of_x, of_gate, of_up, of_down, of_up_bias, of_down_bias = needed
    through_up = of_x or of_up or of_up_bias
    grad_ND, grad_TK = gradients_of_sum(
        *(grad_TD, saved.y, saved.inverse, saved.gate),
        of_rows=through_up or of_down or of_down_bias,
        of_gate=of_gate,
    )
    found: list[Tensor | None] = [None, grad_TK, None, None, None, None]
    if grad_ND is None:
        return found
    found[3], found[5] = gradients_of_weights(
        grad_ND, saved.hidden, saved.offsets, of_weight=of_down, of_bias=of_down_bias
    )
    if not through_up:
        return found
    relu = saved.before is None
    grad_NW = rows_through_weights(
        grad_ND, saved.offsets, saved.down, hidden_NI=saved.hidden if relu else None
    )
    if activation == "swiglu":
        assert saved.before is not None
        grad_NW = gradient_of_swiglu(grad_NW, saved.before)
    elif not relu:
        grad_NW = through_activation(grad_NW, saved, activation)
    found[2], found[4] = gradients_of_weights(
        grad_NW, saved.x, saved.offsets, of_weight=of_up, of_bias=of_up_bias
    )
    if of_x:
        found[0] = rows_through_weights(grad_NW, saved.offsets, saved.up)
    return found
