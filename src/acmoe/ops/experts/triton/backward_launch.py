"""Launches of the kernels in backward.py: the activation's backward and the sums of its partials.

T tokens, K experts each, N = T * K rows, D features, F hidden units, E experts, W = F (swiglu: 2F).
"""

import torch
from torch import Tensor

from acmoe.ops.device.dropout_rng import drop_threshold
from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2
from acmoe.ops.experts.triton.backward import activation_kernel, reduce_partials_kernel
from acmoe.ops.experts.triton.sizes import HiddenInputs, Partials, Sizes, Sums
from acmoe.ops.experts.triton.tiles import Plan

# Tile of the activation's backward: rows of a program, rows of a step, columns, warps.
ACTIVATION_TILE = (128, 8, 128, 4)


def run_activation(da: Tensor, given: HiddenInputs, plan: Plan, size: Sizes) -> Partials:
    """Write dh (N, W), and gate * a (N, F) over da (N, F); return the partial sums."""
    h, dh, gate, grad, sums, dropout, seed = given
    height, rows, block, warps = ACTIVATION_TILE
    block = min(block, next_power_of_2(size.hidden))
    expert, start = plan[height]
    num_blocks = cdiv(size.hidden, block)
    dgate = torch.empty(num_blocks, plan.num_rows, device=h.device)
    dbias = torch.empty(expert.numel(), sum(sums), device=h.device)
    launch(
        *(activation_kernel, (expert.numel(), num_blocks + cdiv(sums.down, block))),
        *(da, h, dh, gate, grad, dgate, dbias, plan.permutation, expert, start, plan.offsets, seed),
        *(plan.num_rows, size.dim, size.hidden, num_blocks, size.top_k),
        ACT=size.act,
        UP_BIAS=sums.up > 0,
        DOWN_BIAS=sums.down > 0,
        DROP_THRESHOLD=drop_threshold(dropout),
        HEIGHT=height,
        BM=rows,
        BN=block,
        num_warps=warps,
    )
    return Partials(dgate, dbias)


def run_reduce_partials(
    partials: Partials,
    bias_dot: Tensor | None,
    expert_N: Tensor,
    plan: Plan,
    size: Sizes,
    sums: Sums,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the partial sums to dgate (T, K) float32 and the bias gradients (E, W) and (E, D).

    A bias gradient has no columns where there is no bias. bias_dot (T, E): grad @ down_bias^T, None
    without a down bias. expert_N: the expert of each sorted row.
    """
    dgate = torch.empty(size.tokens, size.top_k, device=plan.offsets.device)
    d_up, d_down = (
        torch.empty(size.experts, columns, device=dgate.device, dtype=dtype) for columns in sums
    )
    height, width = 16, 64
    columns = cdiv(sum(sums), width)
    programs = size.experts * columns + cdiv(plan.num_rows, height * width)
    launch(
        *(reduce_partials_kernel, (programs,)),
        *(*partials, dgate if bias_dot is None else bias_dot, dgate, d_up, d_down),
        *(plan.permutation, expert_N, plan.offsets, plan.num_rows, partials.gate.shape[0]),
        *(size.experts, size.top_k, *sums, columns),
        HEIGHT=ACTIVATION_TILE[0],
        BE=next_power_of_2(size.experts),
        BM=height,
        BN=width,
        num_warps=4,
    )
    return dgate, d_up, d_down
