"""The products of a grouped GEMM in plain PyTorch: in one call, or as a loop over experts.

On a CPU torch makes the products of the loop (loops.py) in one call in C++, by the same BLAS and
with the same bits (x86 with MKL). The loop takes a few calls of Python for each expert, as long as
a small product (one core of a Xeon with AVX-512, torch 2.13, by a script, microseconds of the loop
and of one call):

    experts  rows   inputs x outputs   forward       gradient of rows   of weights
    8        2,048        64 x 64        188   131        172   121       201   164
    64       256          64 x 64        399   203        329   131       378   165
    32       256       256 x 1,024     3,582 2,854      2,219 2,056
    8        64      1,024 x 1,024     3,915 3,786      2,108 2,029
    128      8          256 x 256        215   292        168   267

N rows, I features in, O features out, E experts.
"""

import functools

import torch
from torch import Tensor

from acmoe.ops.experts.cpu.loops import by_sizes, expert_of_rows, outer_by_sizes, rows_per_expert
from acmoe.ops.experts.cpu.products import chooses_onednn
from acmoe.ops.experts.grouped_mm import rows_by_torch, weights_by_torch

# Experts per row up to which the call serves: an expert without rows takes time in the call, and
# none in the loop.
MOST_EXPERTS = 8
# Numbers of the result, for each expert, up to which adding a bias afterwards takes less time than
# the loop, whose products are added to rows of the bias.
MOST_WITH_BIAS = 2**12
_ALIGNED = 16  # bytes: rows of both operands must be a multiple


def by_expert(
    x_NI: Tensor,
    weight_EOI: Tensor,
    offsets_E: Tensor,
    bias_EO: Tensor | None = None,
    expert_N: Tensor | None = None,
) -> Tensor:
    """Return (N, O): each row times the weight of its expert, plus its expert's bias.

    Rows that belong to no expert give zeros. expert_N: the expert of each row, if the caller has it
    and every row has one.
    """
    N = x_NI.shape[0]
    if not _in_one_call(x_NI, weight_EOI, bias_EO):
        return by_sizes(x_NI, weight_EOI, rows_per_expert(offsets_E, N), bias_EO, expert_N)
    out_NO = rows_by_torch(x_NI, weight_EOI, offsets_E)
    if bias_EO is not None:
        if expert_N is None:
            expert_N = expert_of_rows(rows_per_expert(offsets_E, N))
        out_NO.add_(bias_EO.detach().index_select(0, expert_N))
    if (end := int(offsets_E[-1])) < N:
        out_NO[end:].zero_()
    return out_NO


def outer_by_expert(grad_NO: Tensor, x_NI: Tensor, offsets_E: Tensor) -> Tensor:
    """Return the (E, O, I) weight gradient: grad^T @ x over the rows of each expert."""
    if _outer_in_one_call(grad_NO, x_NI, offsets_E.shape[0]):
        return weights_by_torch(grad_NO, x_NI, offsets_E)
    return outer_by_sizes(grad_NO, x_NI, rows_per_expert(offsets_E, x_NI.shape[0]))


@functools.cache
def has_grouped_on_cpu() -> bool:
    """Return True if this torch has a grouped GEMM for float32 on a CPU."""
    one = torch.ones(1, 4, 4, dtype=torch.float32, device="cpu")
    offsets = torch.full((1,), 4, dtype=torch.int32, device="cpu")
    try:
        torch.nn.functional.grouped_mm(one[0], one, offs=offsets)
    except (AttributeError, RuntimeError):
        return False
    return True


def _in_one_call(x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None) -> bool:
    """Return True if one call takes these rows and weights, and less time than a loop."""
    N, (E, O, I) = x_NI.shape[0], weight_EOI.shape  # noqa: E741, the letters of the shapes
    if not 0 < E <= MOST_EXPERTS * N or (bias_EO is not None and N * O > MOST_WITH_BIAS * E):
        return False
    return _readable(x_NI, weight_EOI) and _aligned(x_NI, I, O) and not chooses_onednn(x_NI)


def _outer_in_one_call(grad_NO: Tensor, x_NI: Tensor, num_experts: int) -> bool:
    """Return True if one call takes these factors of the weights' gradient."""
    if not 0 < num_experts <= MOST_EXPERTS * x_NI.shape[0] or not _readable(grad_NO, x_NI):
        return False
    return _aligned(x_NI, grad_NO.shape[1], x_NI.shape[1]) and not chooses_onednn(x_NI)


def _readable(left: Tensor, right: Tensor) -> bool:
    """Return True for factors of one dtype on a CPU; the right one may be a transposed view."""
    if not left.is_cpu or left.dtype != right.dtype or not left.is_contiguous():
        return False
    if left.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return has_grouped_on_cpu() and (right.is_contiguous() or right.mT.is_contiguous())


def _aligned(x: Tensor, inputs: int, outputs: int) -> bool:
    step = _ALIGNED // x.element_size()
    return inputs > 0 and outputs > 0 and inputs % step == 0 and outputs % step == 0
