"""The products of a grouped GEMM as a loop over experts: for each of them a call of torch.

N rows, r of one expert, I features in, O features out, E experts.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from acmoe.ops.experts.cpu.products import (
    any_layout,
    as_vectors,
    laid_out,
    rows_as_vectors,
    rows_product,
)

Call = tuple[Callable[..., object], Tensor, Tensor, Tensor]  # a function, two factors and `out`


def by_sizes(
    x_NI: Tensor,
    weight_EOI: Tensor,
    sizes: list[int],
    bias_EO: Tensor | None,
    expert_N: Tensor | None = None,
) -> Tensor:
    """Return (N, O): each row times the weight of its expert, plus its expert's bias.

    sizes: `rows_per_expert`. expert_N: the expert of each row, if the caller has it and every row
    has one.
    """
    vectors = as_vectors(x_NI, weight_EOI, max(sizes[:-1], default=0))
    weight_EOI = weight_EOI if vectors else laid_out(weight_EOI, x_NI.shape[0])
    # One check for all experts: a check for each of 8 would take some 5 us.
    by_blas = any_layout(x_NI, weight_EOI)
    if bias_EO is not None and by_blas and not vectors and x_NI.device.type == "cpu":
        return _added_to_bias(x_NI, weight_EOI, sizes, bias_EO, expert_N)
    out_NO = x_NI.new_empty(x_NI.shape[0], weight_EOI.shape[1])
    if vectors:
        _vectors_by_expert(x_NI, weight_EOI, sizes, out_NO, bias_EO)
        return out_NO
    inputs, outputs = x_NI.split_with_sizes(sizes), out_NO.split_with_sizes(sizes)
    for multiply, left, right, out in _calls(inputs, weight_EOI, outputs, sizes, by_blas):
        multiply(left, right, out=out)
    if bias_EO is not None:
        torch._foreach_add_(outputs[:-1], bias_EO.unbind())
    if sizes[-1]:
        outputs[-1].zero_()
    return out_NO


def _calls(
    inputs: tuple[Tensor, ...],
    weight_EOI: Tensor,
    outputs: tuple[Tensor, ...],
    sizes: list[int],
    by_blas: bool,
) -> list[Call]:
    """Return the products of the experts that have rows.

    They are all chosen before the first one runs: a product of a large weight leaves little of
    Python's code in the caches, so that a choice between two products takes longer.
    """
    few = rows_as_vectors(inputs[0], weight_EOI)
    calls: list[Call] = []
    weights = weight_EOI.mT.unbind()
    for x_rI, weight_IO, out_rO, rows in zip(inputs, weights, outputs, sizes, strict=False):
        if rows > few and by_blas:
            calls.append((torch.mm, x_rI, weight_IO, out_rO))
        elif rows == 1 and few:
            calls.append((torch.mv, weight_IO.T, x_rI[0], out_rO[0]))
        elif rows:
            calls.append((rows_product, x_rI, weight_IO.T, out_rO))
    return calls


def _added_to_bias(
    x_NI: Tensor, weight_EOI: Tensor, sizes: list[int], bias_EO: Tensor, expert_N: Tensor | None
) -> Tensor:
    """Compute `by_sizes` on a CPU: products that BLAS adds to rows which hold the bias.

    At nano this takes a fifth less than products and then an addition for each expert.
    """
    expert_N = expert_of_rows(sizes) if expert_N is None else expert_N
    out_NO = bias_EO.detach().index_select(0, expert_N)
    inputs, outputs = x_NI.split_with_sizes(sizes), out_NO.split_with_sizes(sizes)
    weights = weight_EOI.mT.unbind()
    for x_rI, weight_IO, out_rO, rows in zip(inputs, weights, outputs, sizes, strict=False):
        if rows > 1:
            out_rO.addmm_(x_rI, weight_IO)
        elif rows:
            out_rO[0].addmv_(weight_IO.T, x_rI[0])
    if sizes[-1]:
        outputs[-1].zero_()
    return out_NO


def _vectors_by_expert(
    x_NI: Tensor, weight_EOI: Tensor, sizes: list[int], out_NO: Tensor, bias_EO: Tensor | None
) -> None:
    """Write the results of `by_sizes` to `out_NO`, by a matrix-vector product for each row.

    Most experts have no rows here, so indexing the few weights is faster than `unbind` of all.
    """
    # All views are made before the first product. Each product reads a whole weight, which evicts
    # Python's code from the caches.
    experts = [expert for expert, rows in enumerate(sizes[:-1]) for _ in range(rows)]
    outputs = out_NO.unbind()
    calls = list(
        zip([weight_EOI[expert] for expert in experts], x_NI.unbind(), outputs, strict=False)
    )
    for weight_OI, x_I, out_O in calls:
        torch.mv(weight_OI, x_I, out=out_O)
    if bias_EO is not None:
        for expert, out_O in zip(experts, outputs, strict=False):
            out_O.add_(bias_EO[expert])
    for out_O in outputs[len(experts) :]:  # rows of no expert
        out_O.zero_()


def rows_per_expert(offsets_E: Tensor, num_rows: int) -> list[int]:
    """Return the number of rows of each expert, and then of those that belong to none."""
    ends = offsets_E.tolist()
    return [end - start for start, end in zip([0, *ends], [*ends, num_rows], strict=True)]


def expert_of_rows(sizes: list[int]) -> Tensor:
    """Return (N,) the expert of each row on a CPU, and expert 0 for rows that belong to none."""
    repeated = np.arange(len(sizes)).repeat(sizes)
    if sizes[-1]:
        repeated[-sizes[-1] :] = 0
    return torch.from_numpy(repeated)


def outer_by_sizes(grad_NO: Tensor, x_NI: Tensor, sizes: list[int]) -> Tensor:
    """Return the (E, O, I) weight gradient: grad^T @ x over the rows of each expert."""
    out_EOI = x_NI.new_empty(len(sizes) - 1, grad_NO.shape[1], x_NI.shape[1])
    grads, inputs = grad_NO.split_with_sizes(sizes), x_NI.split_with_sizes(sizes)
    for rows, grad_rO, x_rI, out_OI in zip(sizes, grads, inputs, out_EOI.unbind(), strict=False):
        if rows:
            torch.mm(grad_rO.T, x_rI, out=out_OI)
        else:
            out_OI.zero_()
    return out_EOI
