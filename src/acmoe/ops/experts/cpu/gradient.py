"""The experts on a CPU with gradients: one autograd function instead of four.

The function makes the products of the definition and of its gradients, with the same bits; the
gradients of biases are summed in another order. The definition records four functions: two
products, the activation and the sum of each token's outputs. In a small layer, recording each of
them and checking whether it is traced takes longer than multiplying. Rows are gathered before, by a
separate function: x itself is not saved, so it may change in place before the backward.

T tokens, K experts per token, N = T * K rows, D features, F hidden units, W = F (or 2F for swiglu),
E experts.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.dispatch import eager
from acmoe.ops.experts.cpu.bags import sum_of_choices
from acmoe.ops.experts.cpu.by_expert import by_expert, outer_by_expert
from acmoe.ops.experts.grouped import (
    grouped_linear,
    like_weight,
    products_for,
    sum_by_expert,
)
from acmoe.ops.experts.reference import (
    ExpertWeights,
    activated,
    dispatch,
    experts_of_rows,
    tokens_of,
)
from acmoe.ops.grad_mode import is_batched
from acmoe.ops.once import apply, as_saved
from acmoe.ops.sort.reference import Rows


def expert_mlp_with_gradient(
    x: Tensor, weights: ExpertWeights, rows: Rows, gate: Tensor, activation: str
) -> Tensor:
    """Compute `expert_mlp`, (T, D), for rows that all have an expert, without dropout."""
    found: Tensor = apply(_Experts, dispatch(x, rows), gate, *weights, rows, activation)
    return found


class Saved(NamedTuple):
    """The tensors that the backward reads."""

    x: Tensor  # (N, D)
    gate: Tensor  # (T, K)
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    before: Tensor | None  # (N, W) hidden units before the activation; relu does without
    hidden: Tensor  # (N, F)
    y: Tensor  # (N, D)
    permutation: Tensor  # and the other fields of `Rows`
    inverse: Tensor
    offsets: Tensor
    expert: Tensor
    order: Tensor


class _Experts(torch.autograd.Function):
    """Compute the sum over each token's experts from gathered rows."""

    @staticmethod
    def forward(ctx, x, gate, up, down, up_bias, down_bias, rows, activation):  # type: ignore[no-untyped-def]
        # Converted once: torch's grouped GEMM reads int32.
        rows = rows._replace(offsets=rows.offsets.to(torch.int32))
        before_NW = by_expert(x, up, rows.offsets, up_bias, rows.expert)
        hidden_NF = activated(before_NW, activation)
        y_ND = by_expert(hidden_NF, down, rows.offsets, down_bias, rows.expert)
        ctx.activation = activation
        before = None if activation == "relu" else before_NW
        ctx.save_for_backward(
            *(x, gate, up, down, up_bias, down_bias, before, hidden_NF, y_ND),
            *rows,
        )
        return sum_of_choices(y_ND, rows.inverse, gate)

    @staticmethod
    def backward(ctx, grad_TD):  # type: ignore[no-untyped-def]
        saved = Saved(*ctx.saved_tensors)
        needed = ctx.needs_input_grad[:6]
        run = by_definition if torch.is_grad_enabled() else gradients
        return *run(saved, needed, grad_TD, ctx.activation), None, None


def gradients(
    given: Saved, needed: tuple[bool, ...], grad_TD: Tensor, activation: str
) -> list[Tensor | None]:
    """Return the gradients of x, gate, weights and biases; None where one is not needed."""
    # up and down may be transposed views, which the products take.
    saved = Saved(*(*as_saved(given[:2]), *given[2:4], *as_saved(given[4:])))
    found: list[Tensor | None] = [None] * 6
    offsets_E, top_k = saved.offsets, saved.gate.shape[1]
    linear, outer, summed = by_expert, outer_by_expert, partial(_sum_of_rows, saved)
    if is_batched(grad_TD) or not eager(grad_TD, *given):
        linear, outer = products_for(grad_TD)
        summed = partial(sum_by_expert, offsets_E=offsets_E)
    grad_ND = grad_TD.index_select(0, tokens_of(saved.permutation, top_k))
    if needed[1]:
        of_rows_N = (grad_ND * saved.y).sum(-1)
        found[1] = of_rows_N.index_select(0, saved.inverse).view(saved.gate.shape)
    if not any((needed[0], *needed[2:])):
        return found
    grad_ND.mul_(saved.gate.reshape(-1).index_select(0, saved.permutation)[:, None])
    if needed[3]:
        found[3] = like_weight(outer, grad_ND, saved.hidden, offsets_E, saved.down)
    if needed[5]:
        found[5] = summed(grad_ND)
    if not (needed[0] or needed[2] or needed[4]):
        return found
    grad_NF = linear(grad_ND, saved.down.mT, offsets_E)
    grad_NW = through_activation(grad_NF, saved, activation)
    if needed[2]:
        found[2] = like_weight(outer, grad_NW, saved.x, offsets_E, saved.up)
    if needed[4]:
        found[4] = summed(grad_NW)
    if needed[0]:
        found[0] = linear(grad_NW, saved.up.mT, offsets_E)
    return found


def _sum_of_rows(saved: Saved, grad_NO: Tensor) -> Tensor:
    """Return (E, O): the sum of each expert's rows, added one after the other."""
    sums_EO = grad_NO.new_zeros(saved.up.shape[0], grad_NO.shape[1])
    return sums_EO.index_add_(0, saved.expert, grad_NO)


def through_activation(grad_NF: Tensor, saved: Saved, activation: str) -> Tensor:
    """Return the gradient (N, W) of the hidden units before the activation."""
    if saved.before is None:
        return cast(Tensor, torch.ops.aten.threshold_backward(grad_NF, saved.hidden, 0))
    if activation == "gelu":
        return cast(Tensor, torch.ops.aten.gelu_backward(grad_NF, saved.before))
    gate_NF, up_NF = saved.before.chunk(2, dim=-1)
    of_gate_NF = torch.ops.aten.silu_backward(grad_NF * up_NF, gate_NF)
    return torch.cat([of_gate_NF, grad_NF * F.silu(gate_NF)], dim=-1)


def by_definition(
    saved: Saved, needed: tuple[bool, ...], grad_TD: Tensor, activation: str
) -> list[Tensor | None]:
    """Compute `gradients` by the definition, so that they can be differentiated again.

    It differentiates by views of the saved tensors. If it took the tensors themselves, a weight
    from which x or another weight was computed would get its gradient twice, and its hooks would
    run twice.
    """
    with torch.enable_grad():
        given: list[Any] = [
            one.view_as(one) if one is not None and wanted else one
            for one, wanted in zip(saved[:6], needed, strict=True)
        ]
        x, gate, *weights = given
        rows = Rows(*saved[-5:])
        y_TD = experts_of_rows(grouped_linear, x, ExpertWeights(*weights), rows, gate, activation)
        views = [one for one, wanted in zip(given, needed, strict=True) if wanted]
        grads = iter(torch.autograd.grad(y_TD, views, grad_TD, create_graph=True))
    return [next(grads) if wanted else None for wanted in needed]
