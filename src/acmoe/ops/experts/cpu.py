"""The experts on a CPU without gradients: the definition, in fewer calls.

The definition asks at each of its steps whether somebody traces the call, casts or differentiates
it. A small layer takes as long to answer as to multiply: this kernel asks once, counts the rows of
each expert once, and then makes the products of the definition, with the same bits. Few rows of
small experts are multiplied by torch's grouped GEMM, one call instead of one for each expert (the
same bits on x86 with MKL). A single token has its own form (one_token.py). docs/performance/cpu.md
has the times.

T tokens, K experts per token, N = T * K rows, D features, F hidden units, W = F (or 2F for swiglu),
E experts, I inputs and O outputs of a linear map.
"""

import functools

import torch
from torch import Tensor

from acmoe.ops.dispatch import eager
from acmoe.ops.experts.bags import sum_of_choices
from acmoe.ops.experts.loops import by_sizes, rows_per_expert
from acmoe.ops.experts.one_token import expert_mlp_of_one_token
from acmoe.ops.experts.products import chooses_onednn
from acmoe.ops.experts.reference import ExpertWeights, activated, tokens_of
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.sort.reference import Rows

MOST_ROWS = 512  # rows up to which one call for all experts takes less time than one for each
MOST_ELEMENTS = 2**17  # elements of an expert's weight up to which its product is that short


def unsupported(
    x: Tensor, weights: ExpertWeights, gate: Tensor, dropout: float, complete: bool
) -> str | None:
    """Return the reason why the kernel cannot serve this call, or None."""
    if x.device.type != "cpu":
        return "it is for CPUs"
    if x.shape[0] == 0 or not complete:
        return "it serves tokens whose rows all have an expert"
    if not eager(x, *weights, gate):
        return "it is traced"
    if x.dtype not in (torch.float32, torch.float64):
        return "it takes float32 and float64"
    for one in (*weights, gate):
        if one is not None and one.dtype != x.dtype:
            return "it takes tokens, weights and gates of one dtype"
    if torch.is_autocast_enabled("cpu"):
        return "under autocast its products would be narrow"
    if dropout > 0 or records_gradient(x, *weights, gate):
        return "it has no gradient and no dropout"
    return None


def expert_mlp_without_gradient(
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate: Tensor,
    *,
    activation: str,
    dropout: float = 0.0,
    complete: bool = False,
) -> Tensor:
    """Compute `expert_mlp`, (T, D). `unsupported` has refused dropout and incomplete rows."""
    if x.shape[0] == 1:
        return expert_mlp_of_one_token(x, weights, rows, gate, activation=activation)
    x_ND = x.index_select(0, tokens_of(rows.permutation, gate.shape[1]))
    if _in_one_call(x_ND, weights):
        offsets_E = rows.offsets.to(torch.int32)
        h_NW = _grouped(x_ND, weights.up, offsets_E, weights.up_bias, rows.expert)
        h_NF = activated(h_NW, activation)
        y_ND = _grouped(h_NF, weights.down, offsets_E, weights.down_bias, rows.expert)
    else:
        sizes = rows_per_expert(rows.offsets, x_ND.shape[0])
        h_NW = by_sizes(x_ND, weights.up, sizes, weights.up_bias, rows.expert)
        h_NF = activated(h_NW, activation)
        y_ND = by_sizes(h_NF, weights.down, sizes, weights.down_bias, rows.expert)
    return sum_of_choices(y_ND, rows.inverse, gate)


@functools.cache
def _has_grouped() -> bool:
    """Return True if this torch has a grouped GEMM for float32 on a CPU."""
    one = torch.ones(1, 4, 4, dtype=torch.float32, device="cpu")
    offsets = torch.full((1,), 4, dtype=torch.int32, device="cpu")
    try:
        torch.nn.functional.grouped_mm(one[0], one, offs=offsets)
    except (AttributeError, RuntimeError):
        return False
    return True


def _in_one_call(x_ND: Tensor, weights: ExpertWeights) -> bool:
    """Return True if torch's grouped GEMM takes these rows, and less time than a loop."""
    if x_ND.shape[0] > MOST_ROWS or x_ND.dtype != torch.float32 or not _has_grouped():
        return False
    _, width, dim = weights.up.shape
    if width * dim > MOST_ELEMENTS or width % 8 or dim % 4:  # rows of 16 bytes; swiglu halves W
        return False
    return weights.up.is_contiguous() and weights.down.is_contiguous() and not chooses_onednn(x_ND)


def _grouped(
    x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor, bias_EO: Tensor | None, expert_N: Tensor
) -> Tensor:
    """Return (N, O): each row times the weight of its expert, plus its expert's bias."""
    y_NO = torch.nn.functional.grouped_mm(x_NI, weight_EOI.mT, offs=offsets_E)
    return y_NO if bias_EO is None else y_NO.add_(bias_EO.index_select(0, expert_N))
