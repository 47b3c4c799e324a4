"""The products of the experts in C, for tensors that `unsupported` (native.py) has accepted.

N rows sorted by expert, I features in, O features out, E experts, T tokens, K experts per token,
D features, F hidden units, W = F (or 2F for swiglu).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acmoe.ops.experts.reference import activated
from acmoe.ops.native.library import SERVED, functions, pointer
from acmoe.ops.sort.reference import Rows


class NotServedError(Exception):
    """C refused a call: rows without an expert, rows that do not exist, or too little memory."""


def _run(function: Callable[..., int], *arguments: Any) -> None:
    if function(*arguments) != SERVED:
        raise NotServedError


def rows_times_weights(
    x: Tensor,
    weight_EOI: Tensor,
    bias_EO: Tensor | None,
    rows: Rows,
    *,
    relu: bool,
    top_k: int | None = None,
) -> Tensor:
    """Return (N, O): each row times the weight of its expert, plus its expert's bias.

    x: the sorted rows (N, I); or, with top_k, the tokens (T, I) from which C gathers them.
    """
    N, (E, O, I) = rows.permutation.numel(), weight_EOI.shape  # noqa: E741
    gather_N = None if top_k is None else rows.permutation
    out_NO = x.new_empty(N, O)
    _run(
        functions().rows_times_weights,
        *(x.data_ptr(), pointer(gather_N), top_k or 1, rows.offsets.data_ptr()),
        *(weight_EOI.data_ptr(), pointer(bias_EO), N, E, I, O, relu, out_NO.data_ptr()),
    )
    return out_NO


def hidden_units(h_NW: Tensor, activation: str) -> Tensor:
    """Return the activation (N, F) of h (N, W).

    If the activation is relu, h is returned: `rows_times_weights` has applied it already.
    """
    if activation == "relu":
        return h_NW
    if activation != "swiglu":
        return activated(h_NW, activation)
    N, W = h_NW.shape
    hidden_NF = h_NW.new_empty(N, W // 2)
    _run(functions().swiglu, h_NW.data_ptr(), N, W // 2, hidden_NF.data_ptr())
    return hidden_NF


def gradient_of_swiglu(grad_NF: Tensor, h_NW: Tensor) -> Tensor:
    """Return the gradient (N, W) of h through `hidden_units` of swiglu."""
    (N, F), grad_NW = grad_NF.shape, torch.empty_like(h_NW)
    addresses = grad_NF.data_ptr(), h_NW.data_ptr()
    _run(functions().swiglu_backward, *addresses, N, F, grad_NW.data_ptr())
    return grad_NW


def sum_of_choices(y_ND: Tensor, inverse_N: Tensor, gate_TK: Tensor) -> Tensor:
    """Return (T, D): the sum over k of gate[t, k] * y[inverse[t * K + k]]."""
    (T, K), D = gate_TK.shape, y_ND.shape[1]
    y_TD = y_ND.new_empty(T, D)
    addresses = y_ND.data_ptr(), inverse_N.data_ptr(), gate_TK.data_ptr()
    _run(functions().combine, *addresses, T, K, D, y_TD.data_ptr())
    return y_TD


def gradients_of_sum(
    grad_TD: Tensor,
    y_ND: Tensor,
    inverse_N: Tensor,
    gate_TK: Tensor,
    *,
    of_rows: bool,
    of_gate: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients (N, D) of y and (T, K) of gate through `sum_of_choices`, if wanted."""
    (T, K), D = gate_TK.shape, y_ND.shape[1]
    grad_ND = torch.empty_like(y_ND) if of_rows else None
    grad_TK = torch.empty_like(gate_TK) if of_gate else None
    _run(
        functions().combine_backward,
        *(grad_TD.data_ptr(), y_ND.data_ptr(), inverse_N.data_ptr(), gate_TK.data_ptr()),
        *(T, K, D, pointer(grad_ND), pointer(grad_TK)),
    )
    return grad_ND, grad_TK


def rows_through_weights(
    grad_NO: Tensor, offsets_E: Tensor, weight_EOI: Tensor, *, hidden_NI: Tensor | None = None
) -> Tensor:
    """Return (N, I): each row times the transposed weight of its expert.

    hidden_NI: the result of relu, if the weights have read it in the forward: where it is 0, so is
    the gradient.
    """
    N, (E, O, I) = grad_NO.shape[0], weight_EOI.shape  # noqa: E741
    grad_NI = grad_NO.new_empty(N, I)
    _run(
        functions().rows_through_weights,
        *(grad_NO.data_ptr(), offsets_E.data_ptr(), weight_EOI.data_ptr(), pointer(hidden_NI)),
        *(N, E, O, I, grad_NI.data_ptr()),
    )
    return grad_NI


def gradients_of_weights(
    grad_NO: Tensor, x_NI: Tensor, offsets_E: Tensor, *, of_weight: bool, of_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients (E, O, I) of the weights and (E, O) of the biases, if wanted."""
    (N, O), I, E = grad_NO.shape, x_NI.shape[1], offsets_E.shape[0]  # noqa: E741
    grad_EOI = grad_NO.new_empty(E, O, I) if of_weight else None
    grad_EO = grad_NO.new_empty(E, O) if of_bias else None
    if of_weight or of_bias:
        _run(
            functions().outer_of_rows,
            *(grad_NO.data_ptr(), x_NI.data_ptr(), offsets_E.data_ptr(), N, E, O, I),
            *(pointer(grad_EOI), pointer(grad_EO)),
        )
    return grad_EOI, grad_EO
