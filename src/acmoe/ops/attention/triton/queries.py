"""Gradient of the queries of sliding-window attention, from the stored gradient of the scores.

    dq[i] = dq_scale * sum over j of dscore[i, j] * (k[j] + rel_emb[:, W - d]), d = S + i - j

The GEMM with k and the GEMM with rel_emb each read the whole dscore buffer of skew.py, so one
kernel computes both: it loops over the columns, and the elements that the GEMM with k needs were
read shortly before for the GEMM with rel_emb and are still in L2. (H200: 443 us for one layer with
a batch of 48, and 520 us with one kernel after the other.)

One program takes BM rows of two planes of a head: the queries i = 8 * row + plane. Multiplied by
rel_emb, a tile of BM rows and BN columns is a plain GEMM. Multiplied by k, row m is read 8 * m
columns further left, because the keys of the next row, eight queries further, are 8 columns to the
left in the skewed layout.

Shapes as in forward.py; C columns of the buffer, M rows per head and plane.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.attention.triton.forward import blocks_for, launch_options
from acmoe.ops.attention.triton.output import output_ptrs
from acmoe.ops.attention.triton.skew import SKEW, SkewLayout, layout_arguments
from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.device.dot import dot

_PLANES = tl.constexpr(2)  # planes per program; they share the loaded tiles of keys


@triton.jit
def _accumulate_columns(
    c0, acc_k, acc_rel, dscore_base, k_base, rel_emb_base, m, n, p, first_key, starts, ends, N,
    k_stride, plane_stride, pitch, columns, WITH_REL_EMB: tl.constexpr, KV_DIM: tl.constexpr,
):  # fmt: skip
    """Add BN columns of dscore, times k and rel_emb, to the accumulators of both planes.

    The windows are padded with zeros to multiples of 8 columns, so the masks are uniform over 8
    elements and every load is one copy of 16 bytes.
    """
    c = tl.multiple_of(c0, n.shape[0]) + n[None, :]
    key_c = c - m[:, None] * SKEW
    row_offsets = m[:, None] * pitch
    j = (first_key + c0 + n)[:, None]
    k_ptrs = k_base + j.to(tl.int64) * k_stride + p[None, :]
    k = tl.load(k_ptrs, mask=(j >= 0) & (j < N) & (p[None, :] < KV_DIM), other=0.0)
    new_acc_k = ()
    new_acc_rel = ()
    for b in tl.static_range(_PLANES):
        base = dscore_base + b * plane_stride
        if WITH_REL_EMB:
            offsets = (b * p.shape[0] + p[:, None]) * columns + c
            in_bounds = (c < columns) & (p[:, None] < KV_DIM)
            rel_emb = tl.load(rel_emb_base + offsets, mask=in_bounds, other=0.0)
        key_mask = (key_c >= starts[b]) & (key_c < ends[b])
        dscore_by_key = tl.load(base + row_offsets + key_c, mask=key_mask, other=0.0)
        new_acc_k += (dot(dscore_by_key, k, acc_k[b]),)
        if WITH_REL_EMB:
            rel_mask = (c >= starts[b]) & (c < ends[b])
            dscore_by_distance = tl.load(base + row_offsets + c, mask=rel_mask, other=0.0)
            new_acc_rel += (dot(dscore_by_distance, rel_emb.T, acc_rel[b]),)
    return new_acc_k, new_acc_rel if WITH_REL_EMB else acc_rel


@triton.jit
def _zero_before_key0(
    dscore_base, m, n, first_key, key0_column, row_end, plane_stride, pitch, columns
):  # fmt: skip
    """Store zeros in the columns left of key 0, which the gradient of rel_emb reads."""
    zeros = tl.zeros((m.shape[0], n.shape[0]), dscore_base.dtype.element_ty)
    for c0 in range(0, tl.minimum(-first_key, columns), n.shape[0]):
        c = tl.multiple_of(c0, n.shape[0]) + n[None, :]
        for b in tl.static_range(_PLANES):
            row_ptrs = dscore_base + b * plane_stride + m[:, None] * pitch
            tl.store(row_ptrs + c, zeros, mask=(c < key0_column) & (c < row_end))


@triton.jit
def queries_kernel(
    k_ptr, rel_emb_ptr, dscore_ptr, dq_ptr, k_batch, k_head, k_stride, num_heads, L, N, span,
    total_rows, num_rows, pitch, key0_block, columns, left_pad, dq_scale,
    KV_DIM: tl.constexpr, OUT_DIM: tl.constexpr, P: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Store dq of BM rows of two planes, laid out by `empty_output`.

    Columns of dscore whose distance reaches before key 0 are set to zero.
    """
    plane_groups: tl.constexpr = SKEW // _PLANES
    programs = tl.cdiv(num_rows, BM) * plane_groups  # per head
    x = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    b0 = program % plane_groups * _PLANES
    a0 = program // plane_groups * BM
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    p = tl.arange(0, P)
    first_key = (a0 - key0_block) * SKEW  # the key in column 0 of the first row
    key0_column = tl.maximum(-first_key - m * SKEW, 0)[:, None]  # column of key 0 in each row
    row_end = tl.where(a0 + m < num_rows, columns, 0)[:, None]
    starts = ()
    ends = ()
    for b in tl.static_range(_PLANES):  # bounds of the windows, rounded out to multiples of 8
        w = left_pad + b0 + b
        starts += (tl.maximum(key0_column, w // SKEW * SKEW),)
        ends += (tl.minimum(row_end, (w + span + SKEW - 1) // SKEW * SKEW),)
    pitch = pitch // SKEW * SKEW  # lets the compiler prove the alignment
    plane_stride = total_rows.to(tl.int64) * pitch
    dscore_base = dscore_ptr + b0 * plane_stride + (x * num_rows + a0) * pitch
    k_base = k_ptr + x // num_heads * k_batch + x % num_heads * k_head
    rel_emb_base = rel_emb_ptr + b0 * P * columns
    # Two accumulators per plane, because a dot waits for the previous one on the same accumulator.
    acc_k = (tl.zeros((BM, P), tl.float32),) * _PLANES
    acc_rel = (tl.zeros((BM, P), tl.float32),) * _PLANES
    start = tl.maximum(-first_key - (BM - 1) * SKEW, 0) // BN * BN
    rel_end = tl.cdiv(columns, BN) * BN
    for c0 in range(start, rel_end, BN):
        acc_k, acc_rel = _accumulate_columns(
            c0, acc_k, acc_rel, dscore_base, k_base, rel_emb_base, m, n, p, first_key, starts,
            ends, N, k_stride, plane_stride, pitch, columns, True, KV_DIM,
        )  # fmt: skip
    for c0 in range(
        rel_end, columns + (BM - 1) * SKEW, BN
    ):  # keys of later rows end in later columns
        acc_k, acc_rel = _accumulate_columns(
            c0, acc_k, acc_rel, dscore_base, k_base, rel_emb_base, m, n, p, first_key, starts,
            ends, N, k_stride, plane_stride, pitch, columns, False, KV_DIM,
        )  # fmt: skip
    for b in tl.static_range(_PLANES):
        i = (a0 + m) * SKEW + b0 + b
        dq = ((acc_k[b] + acc_rel[b]) * dq_scale).to(dq_ptr.dtype.element_ty)
        in_bounds = (i < L)[:, None] & (p < OUT_DIM)[None, :]
        tl.store(output_ptrs(dq_ptr, x, i, p, num_heads, L, OUT_DIM), dq, mask=in_bounds)
    _zero_before_key0(
        dscore_base, m, n, first_key, key0_column, row_end, plane_stride, pitch, columns
    )


def _blocks_for(dtype: torch.dtype, width: int, skew: SkewLayout) -> Blocks:
    """Choose the tile sizes; more stages after a forward pass on Hopper that saved its weights.

    Only that layout has a row gap, and Hopper has the shared memory. (H200, one layer, batch of 48:
    422 us instead of 439 us with windows of 2,048; 195 us instead of 212 us with 256.)
    """
    if skew.row_gap == 0 or width != 64:
        return blocks_for("attention_queries", dtype, width)
    return Blocks(64, 64, width, 4, 3) if skew.span > 512 else Blocks(64, 32, width, 4, 4)


def queries_gradient(
    k: Tensor,
    rel_emb_8PC: Tensor,
    dscore_8RC: Tensor,
    dq: Tensor,
    skew: SkewLayout,
    scale: float,
    features: int,
) -> None:
    """Fill dq, made by `empty_output`, and zero the columns of dscore that meet no key.

    The features of k and rel_emb from `features` on are zeros.
    """
    blocks = _blocks_for(dq.dtype, rel_emb_8PC.shape[1], skew)
    num = dq.shape[0] * skew.heads
    queries_kernel[(SKEW.value // _PLANES.value * triton.cdiv(skew.rows, blocks.m) * num,)](
        *(k, rel_emb_8PC, dscore_8RC, dq, *k.stride()[:3], *layout_arguments(skew, num)),
        *(skew.columns, skew.left_pad, scale),
        KV_DIM=k.shape[3],
        OUT_DIM=features,
        **launch_options(blocks),
    )
