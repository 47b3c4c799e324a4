"""Sliding-window attention with relative positions: forward pass, one pass over the keys.

For query i at key position S + i, and the keys j at distances d = S + i - j from 1 to W:

    score[i, j] = scale * (q[i] . k[j] + q[i] . rel_emb[:, W - d])
    out[i]      = sum over j of dropout(softmax(score[i]))[j] * v[j]

A GEMM computes the relative-position scores q @ rel_emb first and stores them in the skewed layout
of skew.py, the only (query, key) matrix in memory. One program per tile of BM queries and per head
then loops over tiles of BN keys with FlashAttention's online softmax, adds q @ k^T to the
relative-position scores, and stores the output and the logsumexp.

Shapes: B batch, H heads, X = B * H, L queries, S keys before the first query, N = S + L keys,
W window, P head dimension (padded to a power of two; k and v have KV_DIM features, a multiple of
16), BM queries and BN keys per tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.attention.inputs import Inputs
from acmoe.ops.attention.triton.output import empty_output, output_ptrs
from acmoe.ops.attention.triton.skew import (
    SkewLayout,
    layout_arguments,
    pad_queries,
    query_planes,
    score_offsets,
    shift_rel_emb,
    skewed_position_scores,
)
from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.device.dot import dot, mask_to_dtype
from acmoe.ops.device.dropout_rng import drop_threshold_paired, keep_mask_paired, paired_column_bits

LOG2E = 1.4426950408889634


def blocks_for(kernel: str, dtype: torch.dtype, width: int) -> Blocks:
    """Choose the tile sizes, warps and stages; a tile holds all `width` features of a head."""
    if dtype.itemsize > 2:
        return Blocks(32, 32, width, 4, 2)
    wide = width > 64  # more warps for the registers, fewer stages for the shared memory
    stages = 2 if wide or kernel == "attention_queries" else 3
    return Blocks(64, 64, width, 8 if wide else 4, stages)


@triton.jit
def in_window(i, j, S, L, span):
    """Return (BM, BN) True where query i < L sees key j. Distances below 1 wrap around to large
    unsigned numbers, so one comparison tests both bounds of the window."""
    last_key = tl.where(i < L, S - 1 + i, -1)
    return (last_key[:, None] - j[None, :]).to(tl.uint32, bitcast=True) < span


@triton.jit
def key_tile_ranges(i0, S, L, span, BM: tl.constexpr, BN: tl.constexpr):
    """Compute the ranges of key tiles that a tile of queries attends to; see `split_ranges`."""
    start = tl.maximum(S + i0 - span, 0) // BN * BN
    end = S + tl.minimum(i0 + BM, L) - 1
    first = tl.maximum(S + i0 + BM - 1 - span, 0)
    inner = tl.maximum(start, (first + BN - 1) // BN * BN)
    # If the last tile of queries reaches beyond L, all of its key tiles are masked.
    outer = tl.where(i0 + BM <= L, (S + i0) // BN * BN, inner)
    return split_ranges(start, inner, tl.maximum(inner, outer), end, BN)


@triton.jit
def split_ranges(start, inner, outer, end, size: tl.constexpr):
    """Split the tiles from start to end into edge tiles and interior tiles.

    Edge tiles are before `inner` or from `outer` on and need the window mask. In the interior every
    query sees every key, so the mask is skipped: it costs as much as the softmax of an element.
    An edge has one or two tiles; one loop runs over both edges, so that the pipeline fills once.
    The loops pass num_stages explicitly, because the compiler then also prefetches loads that are
    no operand of a dot: the relative-position scores of edge tiles. (H200: forward 544 us, and
    560 us with three loops; keys kernel 1,100 us, and 1,121 us.)

    Returns the bounds of the edge loop in tiles, the bounds of the interior loop in positions, and
    for `tile_start` the first edge position and the number of edge tiles before the interior.
    """
    num_before = tl.cdiv(tl.maximum(tl.minimum(inner, end) - start, 0), size)
    num_after = tl.cdiv(tl.maximum(end - outer, 0), size)
    return 0, num_before + num_after, inner, outer, start, num_before


@triton.jit
def tile_start(index, ranges, size: tl.constexpr, INTERIOR: tl.constexpr):
    """Convert a loop index into the tile's first position, a multiple of `size`."""
    if INTERIOR:
        return index
    _, _, _, outer, start, num_before = ranges
    return tl.where(index < num_before, start + index * size, outer + (index - num_before) * size)


@triton.jit
def identity(size: tl.constexpr, dtype: tl.constexpr):
    """Return the (size, size) identity matrix."""
    k = tl.arange(0, size)
    return mask_to_dtype(k[:, None] == k[None, :], dtype)


@triton.jit
def initial_scores(position_score, eye, INTERIOR: tl.constexpr):
    """Convert a tile of relative-position scores to the float32 accumulator of q @ k^T.

    Interior tiles are multiplied by the identity: the tensor cores read them from shared memory,
    where they were prefetched, so the 16-bit scores do not pass through registers. An edge tile is
    cast instead: it may hold NaN outside the window, which a GEMM would spread over the row.
    """
    if INTERIOR:
        return dot(position_score, eye, tl.zeros(position_score.shape, tl.float32))
    return position_score.to(tl.float32)


@triton.jit
def load_rows(base, first, n, p, num, stride, INTERIOR: tl.constexpr, DIM: tl.constexpr):
    """Load features p < DIM of rows first + n < num of one head's queries, keys or values; others
    are zero. INTERIOR: all rows exist.

    Only the base address of the tile changes in a loop, not the offsets inside it. (H200: forward
    585 us, and 622 us with an address computed for every row; keys kernel 1,121 us, and 1,157 us.)
    """
    ptrs = base + first.to(tl.int64) * stride + (n[:, None] * stride + p[None, :])
    if INTERIOR and p.shape[0] == DIM:
        return tl.load(ptrs)
    if INTERIOR:
        return tl.load(ptrs, mask=(p < DIM)[None, :], other=0.0)
    return tl.load(ptrs, mask=(first + n < num)[:, None] & (p < DIM)[None, :], other=0.0)


@triton.jit
def load_vector(base, first, n, num, INTERIOR: tl.constexpr):
    """Load elements first + n of a vector with one element per query or per key."""
    if INTERIOR:
        return tl.load(base + first + n)
    return tl.load(base + first + n, mask=first + n < num, other=0)


@triton.jit
def key_bits_kernel(key_bits_ptr, N, BN: tl.constexpr):
    """Store each key's 32 dropout RNG bits, so that no tile of queries has to recompute them."""
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(key_bits_ptr + j, paired_column_bits(j).to(tl.int32, bitcast=True), mask=j < N)


@triton.jit
def _attend_key_tile(
    j0, q, eye, k_base, v_base, score_ptrs, key_mask_ptr, query_bits, key_bits_ptr, i, p, row_max,
    row_sum, acc, S, L, N, span, k_stride, v_stride, scale_log2, INTERIOR: tl.constexpr,
    HAS_MASK: tl.constexpr, THRESHOLD: tl.constexpr, KV_DIM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Update a query tile's online softmax (row_max, row_sum, acc) with one tile of keys."""
    j0 = tl.multiple_of(j0, BN)
    n = tl.arange(0, BN)
    j = j0 + n
    k = load_rows(k_base, j0, n, p, N, k_stride, INTERIOR, KV_DIM)
    v = load_rows(v_base, j0, n, p, N, v_stride, INTERIOR, KV_DIM)
    score = initial_scores(tl.load(score_ptrs + j0), eye, INTERIOR)
    score = dot(q, k.T, score)
    if not INTERIOR:
        score = tl.where(in_window(i, j, S, L, span), score, float("-inf"))
    if HAS_MASK:
        visible = tl.load(key_mask_ptr + j, mask=j < N, other=0)
        score = tl.where((visible != 0)[None, :], score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, axis=1))
    max_log2 = tl.where(new_max > float("-inf"), new_max, 0.0) * scale_log2  # -inf: no key yet
    prob = tl.exp2(score * scale_log2 - max_log2[:, None])
    rescale = tl.exp2(row_max * scale_log2 - max_log2)
    row_sum = row_sum * rescale + tl.sum(prob, axis=1)
    if THRESHOLD > 0:
        key_bits = load_vector(key_bits_ptr, j0, n, N, INTERIOR)
        # Multiply instead of `where`: the compiler moves a `where` behind the cast, which packs two
        # elements into a word, and unpacks them to select. (H200: forward 560 us, `where` 585 us.)
        keep_mask = keep_mask_paired(query_bits[:, None], key_bits[None, :], THRESHOLD)
        prob *= mask_to_dtype(keep_mask, tl.float32)
    return new_max, row_sum, dot(prob.to(v.dtype), v, acc * rescale[:, None])


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, score_ptr, mask_ptr, query_bits_ptr, key_bits_ptr, out_ptr, lse_ptr,
    k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    num_heads, L, N, span, total_rows, num_rows, pitch, key0_block, scale_log2,
    HAS_MASK: tl.constexpr, THRESHOLD: tl.constexpr, KV_DIM: tl.constexpr, OUT_DIM: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the attention output of BM queries of one head with an online softmax in base 2.

    scale_log2 is scale * log2(e). lse (X, L) receives the base-2 logsumexp; 0 where no key is seen.
    """
    x = tl.program_id(1).to(tl.int64)
    i0 = tl.program_id(0) * BM
    i = i0 + tl.arange(0, BM)
    p = tl.arange(0, P)
    valid = i < L
    S = N - L
    q = load_rows(q_ptr + x * L * P, i0, tl.arange(0, BM), p, L, P, False, P)
    k_base = k_ptr + x // num_heads * k_batch + x % num_heads * k_head
    v_base = v_ptr + x // num_heads * v_batch + x % num_heads * v_head
    key_mask_ptr = mask_ptr + x // num_heads * N
    clamped = tl.minimum(i, L - 1)
    offsets = score_offsets(x, clamped, total_rows, num_rows, pitch, key0_block)
    score_ptrs = score_ptr + offsets[:, None] + tl.arange(0, BN)[None, :]
    query_bits = tl.load(query_bits_ptr + x * L + i, mask=valid, other=0) if THRESHOLD > 0 else i
    eye = identity(BN, score_ptr.dtype.element_ty)
    row_max = tl.full((BM,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, P), tl.float32)
    ranges = key_tile_ranges(i0, S, L, span, BM, BN)
    for INTERIOR in tl.static_range(2):
        low, high = ranges[2 * INTERIOR], ranges[2 * INTERIOR + 1]
        for index in tl.range(low, high, BN if INTERIOR else 1, num_stages=STAGES):
            row_max, row_sum, acc = _attend_key_tile(
                tile_start(index, ranges, BN, INTERIOR), q, eye, k_base, v_base, score_ptrs,
                key_mask_ptr, query_bits, key_bits_ptr, i, p, row_max, row_sum, acc, S, L, N, span,
                k_stride, v_stride, scale_log2, INTERIOR, HAS_MASK, THRESHOLD, KV_DIM, BN,
            )  # fmt: skip
    empty = row_sum == 0.0
    inv = tl.where(empty, 0.0, 1.0 / (1.0 - THRESHOLD / 4294967296)) / tl.where(empty, 1.0, row_sum)
    out_ptrs = output_ptrs(out_ptr, x, i, p, num_heads, L, OUT_DIM)
    in_bounds = valid[:, None] & (p < OUT_DIM)[None, :]
    tl.store(out_ptrs, (acc * inv[:, None]).to(out_ptr.dtype.element_ty), mask=in_bounds)
    lse = tl.where(empty, 0.0, row_max * scale_log2 + tl.log2(tl.where(empty, 1.0, row_sum)))
    tl.store(lse_ptr + x * L + i, lse, mask=valid)


def dropout_key_bits(num: int, dropout: float, device: torch.device) -> Tensor:
    """Return (N,) int32 dropout RNG bits of the keys; left uninitialised without dropout."""
    key_bits = torch.empty(num, dtype=torch.int32, device=device)
    if dropout > 0:
        key_bits_kernel[(triton.cdiv(num, 1024),)](key_bits, num, BN=1024)
    return key_bits


def kv_strides(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the batch, head and position strides of k and v; the feature stride must be 1."""
    assert k.stride(3) == 1 and v.stride(3) == 1
    return (*k.stride()[:3], *v.stride()[:3])


def launch_options(blocks: Blocks) -> dict[str, int]:
    """Return the tile sizes, warps and stages as keyword arguments of a launch."""
    return {
        "P": blocks.k,
        "BM": blocks.m,
        "BN": blocks.n,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def softmax_options(blocks: Blocks, key_mask: Tensor | None, dropout: float) -> dict[str, int]:
    """Return `launch_options` and the constants of the kernels that compute probabilities."""
    return launch_options(blocks) | {
        "HAS_MASK": key_mask is not None,
        "THRESHOLD": drop_threshold_paired(dropout),
        "STAGES": blocks.num_stages,
    }


def run_forward(given: Inputs) -> tuple[Tensor, Tensor]:
    """Return the (B, H, L, `features`) output, laid out by `empty_output`, and the (B, H, L) lse.

    The batch is processed in slices that bound the score buffer.
    """
    q, k, v, rel_emb, key_mask, query_bits, scale, dropout, features = given
    batch, heads, num_queries, width = q.shape
    skew = SkewLayout(heads, num_queries, k.shape[2], rel_emb.shape[1])
    out = empty_output(q, features)
    lse = torch.empty(q.shape[:3], device=q.device)
    rel_emb_8PC = shift_rel_emb(rel_emb, skew, q.dtype)
    key_bits = dropout_key_bits(skew.keys, dropout, q.device)
    blocks = blocks_for("attention", q.dtype, width)
    for part in skew.batch_slices(batch, q.element_size()):
        scores = skewed_position_scores(query_planes(pad_queries(q[part], skew)), rel_emb_8PC)
        mask = q if key_mask is None else key_mask[part].to(torch.uint8)
        num = q[part].shape[0] * heads
        forward_kernel[(triton.cdiv(num_queries, blocks.m), num)](
            *(q[part], k[part], v[part], scores, mask, query_bits[part], key_bits),
            *(out[part], lse[part], *kv_strides(k, v), *layout_arguments(skew, num), scale * LOG2E),
            KV_DIM=k.shape[3],
            OUT_DIM=features,
            **softmax_options(blocks, key_mask, dropout),
        )
    return out, lse
