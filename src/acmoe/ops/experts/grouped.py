"""Grouped GEMM in plain PyTorch: one matmul per expert, over rows sorted by expert.

`grouped_linear` is a custom op, so that `torch.compile(fullgraph=True)` sees one call instead of a
loop whose bounds depend on data. There are no atomics, so equal inputs give equal bits.

N rows, I features in, O features out, E experts.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from acmoe.ops.dispatch import eager, transforming
from acmoe.ops.experts.cpu.by_expert import by_expert, outer_by_expert
from acmoe.ops.experts.cpu.loops import rows_per_expert
from acmoe.ops.flops import tell_counters
from acmoe.ops.grad_mode import is_batched, records_gradient
from acmoe.ops.once import apply
from acmoe.ops.precision import autocast_dtype

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def sum_by_expert(grad_NO: Tensor, offsets_E: Tensor) -> Tensor:
    """Return the (E, O) bias gradient: the sum of each expert's rows.

    It has the bits of `reference.linear`, which multiplies by a one-hot matrix: a recomputed block
    takes that path. Rows are sorted, so that numpy repeats each row of an identity matrix: torch
    takes five calls to compare ids.
    """
    E, dtype = offsets_E.shape[0], grad_NO.dtype
    kind = _NUMPY.get(dtype)
    if kind is not None and grad_NO.device.type == "cpu" and _direct(grad_NO, offsets_E):
        identity = np.eye(E + 1, E, dtype=kind)  # the last row is for rows of no expert
        sizes = rows_per_expert(offsets_E, grad_NO.shape[0])
        return torch.from_numpy(identity.repeat(sizes, 0)).T.mm(grad_NO)
    rows_N = torch.arange(grad_NO.shape[0], device=grad_NO.device)
    expert_N = torch.bucketize(rows_N, offsets_E, right=True)
    ids_E = torch.arange(E, device=grad_NO.device)
    return (expert_N[:, None] == ids_E).to(dtype).T.mm(grad_NO)


@torch.library.custom_op("acmoe::grouped_linear", mutates_args=())
def _grouped_linear(x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    return by_expert(x_NI, weight_EOI, offsets_E)


@_grouped_linear.register_fake
def _(x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_EOI.shape[1])


@torch.library.custom_op("acmoe::grouped_outer", mutates_args=())
def _grouped_outer(grad_NO: Tensor, x_NI: Tensor, offsets_E: Tensor) -> Tensor:
    return outer_by_expert(grad_NO, x_NI, offsets_E)


@_grouped_outer.register_fake
def _(grad_NO: Tensor, x_NI: Tensor, offsets_E: Tensor) -> Tensor:
    return x_NI.new_empty(offsets_E.shape[0], grad_NO.shape[1], x_NI.shape[1])


@_grouped_outer.register_vmap
def _(info, in_dims, *batched):  # type: ignore[no-untyped-def]
    """Compute one gradient after the other, for a backward inside `torch.func.vmap`."""
    given = [
        [tensor] * info.batch_size if dim is None else tensor.unbind(dim)
        for tensor, dim in zip(batched, in_dims, strict=True)
    ]
    return torch.stack([_grouped_outer(*one) for one in zip(*given, strict=True)]), 0


def like_weight(
    outer: Callable[[Tensor, Tensor, Tensor], Tensor],
    grad_NO: Tensor,
    x_NI: Tensor,
    offsets_E: Tensor,
    weight_EOI: Tensor,
) -> Tensor:
    """Return the (E, O, I) gradient of a weight, laid out in memory as the weight is."""
    if weight_EOI.stride(-1) == 1:
        return outer(grad_NO, x_NI, offsets_E)
    return outer(x_NI, grad_NO, offsets_E).mT  # the weight is a transposed view


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_NO):  # type: ignore[no-untyped-def]
    x_NI, weight_EOI, offsets_E = ctx.saved_tensors
    grad_NO = grad_NO.contiguous()
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = _grouped_linear(grad_NO, weight_EOI.mT, offsets_E)
    if ctx.needs_input_grad[1]:
        grad_weight = like_weight(_grouped_outer, grad_NO, x_NI, offsets_E, weight_EOI)
    return grad_x, grad_weight, None


_grouped_linear.register_autograd(_backward, setup_context=_save)


def _save_outer(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward_outer(ctx, grad_EOI):  # type: ignore[no-untyped-def]
    grad_NO, x_NI, offsets_E = ctx.saved_tensors
    found_NO = found_NI = None
    if ctx.needs_input_grad[0]:
        found_NO = _grouped_linear(x_NI, grad_EOI, offsets_E)
    if ctx.needs_input_grad[1]:
        found_NI = _grouped_linear(grad_NO, grad_EOI.mT, offsets_E)
    return found_NO, found_NI, None


_grouped_outer.register_autograd(_backward_outer, setup_context=_save_outer)


def _masked_linear(x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute `grouped_linear` with every expert on all rows, for transforms of `torch.func`.

    It takes E times the work, and nothing in it depends on the values of the offsets.
    """
    row_N1 = torch.arange(x_NI.shape[0], device=x_NI.device)[:, None]
    begin_E = torch.cat([torch.zeros_like(offsets_E[:1]), offsets_E[:-1]])
    out_NO = x_NI.new_zeros(())
    for weight_OI, begin, end in zip(weight_EOI, begin_E, offsets_E, strict=True):
        own_N1 = (row_N1 >= begin) & (row_N1 < end)
        out_NO = torch.where(own_N1, x_NI @ weight_OI.T, out_NO)
    return out_NO


class _Linear(torch.autograd.Function):
    """`by_expert` with a gradient. The custom op costs 0.2 ms more forward and backward."""

    @staticmethod
    def forward(ctx, x_NI, weight_EOI, offsets_E, bias_EO):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_NI, weight_EOI, offsets_E)
        return by_expert(x_NI, weight_EOI, offsets_E, bias_EO)

    @staticmethod
    def backward(ctx, grad_NO):  # type: ignore[no-untyped-def]
        x_NI, weight_EOI, offsets_E = ctx.saved_tensors
        linear, outer = products_for(grad_NO)
        grad_NO = grad_NO.contiguous()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = linear(grad_NO, weight_EOI.mT, offsets_E)
        if ctx.needs_input_grad[1]:
            grad_weight = like_weight(outer, grad_NO, x_NI, offsets_E, weight_EOI)
        if ctx.needs_input_grad[3]:
            grad_bias = sum_by_expert(grad_NO, offsets_E)
        return grad_x, grad_weight, None, grad_bias


def _linear(
    x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor, bias_EO: Tensor | None = None
) -> Tensor:
    """Compute `grouped_linear` in the dtype of x."""
    if transforming():
        return _masked_linear(x_NI, weight_EOI, offsets_E)
    out_NO: Tensor
    if not _direct(x_NI, weight_EOI):
        tell_counters()
        out_NO = _grouped_linear(x_NI, weight_EOI, offsets_E)
    elif records_gradient(x_NI, weight_EOI, bias_EO):
        out_NO = apply(_Linear, x_NI, weight_EOI, offsets_E, bias_EO)
    else:
        out_NO = by_expert(x_NI, weight_EOI, offsets_E, bias_EO)
    return out_NO


def _outer(grad_NO: Tensor, x_NI: Tensor, offsets_E: Tensor) -> Tensor:
    """Return the (E, O, I) weight gradient; it has a gradient itself where one is recorded."""
    if not _direct(grad_NO, x_NI) or records_gradient(grad_NO, x_NI):
        found: Tensor = _grouped_outer(grad_NO, x_NI, offsets_E)
        return found
    return outer_by_expert(grad_NO, x_NI, offsets_E)


def _direct(x: Tensor, *others: Tensor) -> bool:
    """Return True if the products may read the offsets on the host, without a custom op."""
    return not x.is_meta and eager(x, *others)


def products_for(grad: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the products by weights, and of weights' gradients, for a backward with this gradient.

    Both take gradients of any form, and are recorded where gradients are.
    """
    return (_grouped_linear, _grouped_outer) if is_batched(grad) else (_linear, _outer)


def adds_bias(x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> bool:
    """Return True if `grouped_linear` takes the bias of this call."""
    return _direct(x_NI, weight_EOI, bias_EO)


def grouped_linear(
    x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor, bias_EO: Tensor | None = None
) -> Tensor:
    """Return (N, O): rows offsets_E[e-1] to offsets_E[e] of x times weight[e]^T, plus bias[e].

    Rows from offsets_E[-1] on belong to no expert and give zeros. Under autocast it runs in the
    16-bit dtype, as `torch.nn.functional.linear` does. A bias is for calls that `adds_bias` allows.
    """
    dtype = autocast_dtype(x_NI) or x_NI.dtype
    x_NI, weight_EOI = x_NI.to(dtype), weight_EOI.to(dtype)
    bias_EO = None if bias_EO is None else bias_EO.to(dtype)
    return _linear(x_NI, weight_EOI, offsets_E, bias_EO)
