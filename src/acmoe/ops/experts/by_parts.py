"""Experts with an activation or a norm that has no fused kernel: GEMMs and the function between.

`expert_mlp` is faster where it knows the activation. This form takes any function, and weights in
any layout: they are passed to the GEMMs as views and never copied.

T tokens, K experts per token, N = T * K rows, D features, E experts, I inputs and O outputs of a
linear map.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from acmoe.ops.dispatch import DEFINITION, requested, transforming
from acmoe.ops.experts.grouped import grouped_linear
from acmoe.ops.experts.grouped_mm import grouped_mm
from acmoe.ops.experts.op import grouped_gemm_unsupported
from acmoe.ops.experts.reference import (
    ExpertWeights,
    GroupedGemm,
    combine,
    dispatch,
    linear,
    permute,
)
from acmoe.ops.flops import tell_counters
from acmoe.ops.sort.reference import Rows


def expert_mlp_by_parts(
    x_TD: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate_TK: Tensor,
    *,
    activation: Callable[[Tensor], Tensor],
    norm: Callable[[Tensor], Tensor] | None = None,
    complete: bool = False,
) -> Tensor:
    """Return (T, D): the sum over a token's experts of gate * norm(down(activation(up(x)))).

    Args:
        x_TD: tokens, in the dtype that the GEMMs run in.
        weights: up (E, W, D) and down (E, D, F) as tensors or transposed views of them.
        rows: the routed rows sorted by expert.
        gate_TK: combine weights; 0 for a row without an expert.
        activation: maps (N, W) to (N, F), row by row.
        norm: maps (N, D) to (N, D), row by row; None: the identity.
        complete: the caller guarantees that every row has an expert.
    """
    gemm = choose_gemm(x_TD, weights, gate_TK.numel(), complete=complete)
    h_NF = activation(linear(gemm, dispatch(x_TD, rows), weights.up, weights.up_bias, rows))
    y_ND = linear(gemm, h_NF, weights.down, weights.down_bias, rows)
    if norm is not None:
        y_ND = norm(y_ND)
    if y_ND.dtype == gate_TK.dtype:
        return combine(y_ND, gate_TK, rows).to(x_TD.dtype)
    # The product has the wider dtype of the two, so that float32 gates are not rounded.
    y_TKD = permute(y_ND, rows.inverse, rows.permutation).view(*gate_TK.shape, y_ND.shape[-1])
    return (y_TKD * gate_TK[..., None]).sum(1).to(x_TD.dtype)


def choose_gemm(
    x_TD: Tensor, weights: ExpertWeights, num_rows: int, *, complete: bool
) -> GroupedGemm:
    """Return the grouped GEMM for a call with these tokens and weights."""
    widths = (weights.up.shape[1], weights.up.shape[2], weights.down.shape[2])
    plain = transforming() or requested() == DEFINITION or num_rows == 0
    if plain or grouped_gemm_unsupported(x_TD, *widths) is not None:
        return grouped_linear
    return grouped_mm_of_complete_rows if complete else grouped_mm


def grouped_mm_of_complete_rows(x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute `grouped_mm` where every row has an expert, without its two passes of masking."""
    tell_counters()
    return torch.nn.functional.grouped_mm(x_NI, weight_EOI.mT, offs=offsets_E.to(torch.int32))
