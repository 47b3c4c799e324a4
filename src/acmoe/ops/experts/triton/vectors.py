"""The experts of a few tokens as matrix-vector products, without gradient: two launches.

    up_vector_kernel     a (N, F) = act(up[e] x[token] + up_bias[e]) of each sorted row
    down_vector_kernel   out (T, D) = sum over k of gate[t, k] * (down[e] a[row] + down_bias[e])

A token that shares its experts with few others gives each expert one row. The time is that of
reading the chosen experts' weights, K * (W + F) * D elements a token, so that every multiprocessor
must have loads in flight, about 40 KiB: many programs of few columns each, with a pipeline of three
stages (`rules.VECTORS`). They multiply on the ordinary ALUs, 2 operations for each element read. A
row tile of the grouped GEMMs (forward.py) would be padding but for one row, and needs two more
launches, for the tile tables and to combine. Rows of the same expert read its weights once each;
programs with the same columns follow each other, so that the second read comes from L2.

T tokens, K experts per token, N = T * K rows sorted by expert, D features, F hidden units, W = F
(or 2F for swiglu), E experts. The id E means "no expert": such a choice adds nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2
from acmoe.ops.experts.settings import rules
from acmoe.ops.experts.triton.forward import up_epilogue
from acmoe.ops.experts.triton.sizes import Operands, Sizes


@triton.jit
def up_vector_kernel(
    x_ptr, up_ptr, bias_ptr, a_ptr, permutation_ptr, expert_ptr, num_rows, num_experts, D, F, top_k,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    BF: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute BF hidden units of one sorted row, reading BK features at a time.

    EVEN: BK divides D.
    """
    rows = tl.program_id(0) % num_rows + tl.arange(0, 1)
    units = tl.program_id(0) // num_rows * BF + tl.arange(0, BF)
    row = tl.program_id(0) % num_rows
    expert = tl.load(expert_ptr + row).to(tl.int64)
    token = tl.load(permutation_ptr + row).to(tl.int64) // top_k
    if (expert < 0) | (expert >= num_experts):
        return
    W = 2 * F if ACT == "swiglu" else F
    k = tl.arange(0, BK)
    x_ptrs = x_ptr + token * D + k
    w_ptrs = up_ptr + (expert * W + tl.minimum(units, F - 1)[:, None]) * D + k[None, :]
    acc = tl.zeros((BF, BK), dtype=tl.float32)
    acc_up = tl.zeros((BF, BK), dtype=tl.float32)
    for start in tl.range(0, D, BK, num_stages=STAGES):
        inside = k < D - start
        if EVEN:
            x = tl.load(x_ptrs + start).to(tl.float32)
            w = tl.load(w_ptrs + start)
        else:
            x = tl.load(x_ptrs + start, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(w_ptrs + start, mask=inside[None, :], other=0.0)
        acc += w.to(tl.float32) * x[None, :]
        if ACT == "swiglu":
            u_ptrs = w_ptrs + F * D + start
            if EVEN:
                u = tl.load(u_ptrs)
            else:
                u = tl.load(u_ptrs, mask=inside[None, :], other=0.0)
            acc_up += u.to(tl.float32) * x[None, :]
    up_epilogue(
        tl.sum(acc, axis=1)[None, :], tl.sum(acc_up, axis=1)[None, :], bias_ptr, a_ptr, a_ptr,
        a_ptr, expert, rows, rows < num_rows, units, F, False, ACT, HAS_BIAS, 0, False,
    )  # fmt: skip


@triton.jit
def down_vector_kernel(
    a_ptr, down_ptr, bias_ptr, gate_ptr, out_ptr, inverse_ptr, expert_ptr, num_tokens, num_experts,
    D, F, K: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr, BC: tl.constexpr,
    BD: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute BD features of one token: all its choices at once, BK hidden units at a time."""
    token = tl.program_id(0) % num_tokens
    cols = tl.program_id(0) // num_tokens * BD + tl.arange(0, BD)
    choice = tl.arange(0, BC)
    row = tl.load(inverse_ptr + token * K + choice, mask=choice < K, other=0).to(tl.int64)
    expert = tl.load(expert_ptr + row, mask=choice < K, other=-1).to(tl.int64)
    routed = (expert >= 0) & (expert < num_experts)
    expert = tl.where(routed, expert, 0)
    gate = tl.load(gate_ptr + token * K + choice, mask=routed, other=0.0).to(tl.float32)
    k = tl.arange(0, BK)
    w_rows = expert[:, None] * D + tl.minimum(cols, D - 1)[None, :]
    w_ptrs = down_ptr + w_rows[:, :, None] * F + k[None, None, :]
    a_ptrs = a_ptr + row[:, None] * F + k[None, :]
    acc = tl.zeros((BC, BD, BK), dtype=tl.float32)
    for start in tl.range(0, F, BK, num_stages=STAGES):
        mask = routed[:, None] & (k < F - start)[None, :]
        a = tl.load(a_ptrs + start, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptrs + start, mask=mask[:, None, :], other=0.0).to(tl.float32)
        acc += w * a[:, None, :]
    y = tl.sum(acc, axis=2)
    if HAS_BIAS:
        y += tl.load(bias_ptr + w_rows, mask=routed[:, None], other=0.0).to(tl.float32)
    # A row that has no expert would make NaN of an infinite gate.
    y = tl.sum(tl.where(routed[:, None], y * gate[:, None], 0.0), axis=0)
    out_ptrs = out_ptr + token.to(tl.int64) * D + cols
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=cols < D)


def run_vectors(given: Operands, size: Sizes) -> Tensor:
    """Return (T, D), the outputs of `expert_mlp`; `rules.by_vectors` says for which calls."""
    x, up, down, up_bias, down_bias = given[:5]
    num_rows = given.permutation.numel()
    a = torch.empty(num_rows, size.hidden, device=x.device, dtype=x.dtype)
    out = torch.empty_like(x)
    units, inner, num_warps, stages = rules.vector_blocks("up", size.dim, size.width // size.hidden)
    launch(
        *(up_vector_kernel, (num_rows * cdiv(size.hidden, units),)),
        *(x, up, up if up_bias is None else up_bias, a, given.permutation, given.expert),
        *(num_rows, size.experts, size.dim, size.hidden, size.top_k),
        ACT=size.act,
        HAS_BIAS=up_bias is not None,
        EVEN=size.dim % inner == 0,
        STAGES=stages,
        BF=units,
        BK=inner,
        num_warps=num_warps,
    )
    choices = next_power_of_2(size.top_k)
    columns, inner, num_warps, stages = rules.vector_blocks("down", size.hidden, choices)
    launch(
        *(down_vector_kernel, (size.tokens * cdiv(size.dim, columns),)),
        *(a, down, down if down_bias is None else down_bias),
        *(given.gate, out, given.inverse, given.expert),
        *(size.tokens, size.experts, size.dim, size.hidden),
        K=size.top_k,
        HAS_BIAS=down_bias is not None,
        STAGES=stages,
        BC=choices,
        BD=columns,
        BK=inner,
        num_warps=num_warps,
    )
    return out
