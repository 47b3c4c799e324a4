"""Sliding-window attention with relative positions on Hopper: forward pass.

The result is that of triton/forward.py, but the relative-position scores q @ rel_emb never go
through global memory: the kernel computes them as it walks over the keys. For each tile of 64 keys
it multiplies the queries by 64 more columns of rel_emb, and keeps the scores in a shared-memory
staging buffer until the keys that they belong to arrive (staging.py).

One program computes 128 queries of one head with two warpgroups, each of which has every second
query. They share the tiles of k, v and rel_emb, which TMA loads one step ahead (loads.py). The
warpgroups are not synchronised with each other: while one waits for the tensor cores, the other
computes exponentials. For backward, the kernel can store the attention weights (save_weights.py).

Shapes: B batch, H heads, X = B * H, L queries, S keys before the first query, N = S + L keys,
W window, P head dimension, of which the first HEAD_DIM, a multiple of 16, are multiplied and the
first OUT_DIM are stored.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from acmoe.ops.attention.hopper.dropout import (
    apply_dropout,
    apply_signed_dropout,
    load_pair_bits,
    pair_bits_kernel,
    row_terms,
)
from acmoe.ops.attention.hopper.gemm import (
    CHUNKED_DIM,
    chunk_widths,
    load_queries,
    scale_rows,
    stage_tile,
    start_score_gemm,
    start_value_gemm,
    store_output,
    wait_accumulators,
    zero_accumulators,
)
from acmoe.ops.attention.hopper.loads import load_stage, tile_descriptor, tile_schedule, wait_stage
from acmoe.ops.attention.hopper.save_weights import (
    STAGING_BYTES,
    first_saved_key,
    stage_weights,
    store_descriptor,
    store_running_max,
    store_weights,
)
from acmoe.ops.attention.hopper.saved_weights import SavedWeights, saved_layout
from acmoe.ops.attention.hopper.softmax import (
    mask_scores,
    online_softmax_step,
    store_lse,
    zero_row_sums,
)
from acmoe.ops.attention.hopper.staging import (
    KEYS,
    QUERIES,
    ROWS,
    SCORE,
    load_skewed_scores,
    query_of_row,
    stage_scores,
    staging_words,
)
from acmoe.ops.attention.inputs import Inputs
from acmoe.ops.attention.triton.forward import LOG2E
from acmoe.ops.attention.triton.output import empty_output
from acmoe.ops.device.dropout_rng import drop_threshold_paired, packed_limit
from acmoe.ops.device.gluon_blocks import make_barriers

_STAGES = 2  # buffers for k, v and rel_emb tiles; three would leave one program per SM


@gluon.jit
def _prologue(q, staging, schedule, b, h, pipeline, GROUP: gl.constexpr):
    """Compute the relative-position scores that the first tile of keys needs, but for the last 64
    columns; start the pipeline."""
    _, tiles, full, empty = pipeline
    _, _, _, first_step = schedule
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    if len(tiles) > GROUP:
        load_stage(first_step, schedule, b, h, pipeline, GROUP)
    for step in range(first_step, 0):
        if len(tiles) > GROUP:
            load_stage(step + 1, schedule, b, h, pipeline, GROUP)
        stage = wait_stage(step, first_step, full)
        score = start_score_gemm(q, stage_tile(tiles, 2, stage), zeros, False)
        score = warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(empty.index(stage), count=1)
        stage_scores(staging, step + 3, score, q[0].dtype)


@gluon.jit
def _dropout(weight, factor, term, bits_ptr, limit, KEEP_PROB: gl.constexpr, SAVE: gl.constexpr):
    """Return the weights to be saved (dropped ones negative), and those that multiply v."""
    signed = weight
    if KEEP_PROB < 1:
        if SAVE:
            pairs = load_pair_bits(bits_ptr)
            signed, weight = apply_signed_dropout(weight, factor, term, pairs, limit)
        else:
            weight = apply_dropout(weight, factor, term, load_pair_bits(bits_ptr), limit)
    return signed, weight


@gluon.jit
def _warpgroup(
    q_ptr, pipeline, staging, weight_staging, mask_ptr, query_bits_ptr, pair_bits_ptr, out_ptr,
    lse_ptr, saved, num_heads, L, N, span, scale_log2, limit, HAS_MASK: gl.constexpr,
    KEEP_PROB: gl.constexpr, SAVE: gl.constexpr, P: gl.constexpr, HEAD_DIM: gl.constexpr,
    OUT_DIM: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Compute the output of half of the program's 128 queries: those numbered GROUP, GROUP + 2, ...

    Each warpgroup also issues the TMA loads of one chunk of the head dimension, number GROUP, for
    both warpgroups.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    _, tiles, full, empty = pipeline
    query_tiles = gl.cdiv(L, QUERIES)
    x, i0 = gl.program_id(0) // query_tiles, gl.program_id(0) % query_tiles * QUERIES
    b, h, rows = x // num_heads, x % num_heads, x.to(gl.int64) * L
    schedule = tile_schedule(i0, L, N, span)
    start, steps, _, first_step = schedule
    interior_start = N - L + i0 + QUERIES - 1 - span
    interior_end = gl.where(i0 + QUERIES <= L, N - L + i0 - KEYS, -1)
    i = i0 + query_of_row(gl.arange(0, ROWS, gl.SliceLayout(1, SCORE)), GROUP)
    last_key = gl.where(i < L, N - L - 1 + i, -1)
    factor, term = i, i
    if KEEP_PROB < 1:
        factor, term = row_terms(gl.load(query_bits_ptr + rows + i, mask=i < L, other=0))
    q = load_queries(q_ptr + rows * P, i0, L, P, HEAD_DIM, GROUP)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORE))
    row_sum = zero_row_sums()
    acc = zero_accumulators(HEAD_DIM)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    _prologue(q, staging, schedule, b, h, pipeline, GROUP)
    for step in range(0, steps):
        j0 = start + step * KEYS
        score = load_skewed_scores(staging, step, dtype, GROUP)
        stage = wait_stage(step, first_step, full)
        score = start_score_gemm(q, stage_tile(tiles, 0, stage), score, True)
        if len(tiles) > GROUP:
            if step + 1 < steps:
                load_stage(step + 1, schedule, b, h, pipeline, GROUP)
        score = warpgroup_mma_wait(0, deps=[score])
        key_mask_ptr = mask_ptr + b.to(gl.int64) * N
        score = mask_scores(
            score, last_key, j0, interior_start, interior_end, span, key_mask_ptr, N, HAS_MASK
        )
        weight, max_log2, rescale, row_max, row_sum = online_softmax_step(
            score, row_max, row_sum, scale_log2
        )
        bits_ptr = pair_bits_ptr + j0 // 2
        signed, weight = _dropout(weight.to(dtype), factor, term, bits_ptr, limit, KEEP_PROB, SAVE)
        if SAVE:
            stage_weights(weight_staging, signed)
            store_running_max(saved[1], max_log2, rows, i0, j0, L, N, GROUP)
        acc = scale_rows(acc, rescale)
        # Issue the rel_emb GEMM first: its result is staged while the GEMM with v runs.
        next_score = start_score_gemm(q, stage_tile(tiles, 2, stage), zeros, False)
        acc = start_value_gemm(acc, weight, stage_tile(tiles, 1, stage))
        if SAVE:
            store_weights(saved[0], weight_staging, x, i0, j0 - saved[2], GROUP)
        next_score = warpgroup_mma_wait(len(acc), deps=[next_score])
        stage_scores(staging, step + 3, next_score, dtype)
        acc = wait_accumulators(acc)
        mbarrier.arrive(empty.index(stage), count=1)
    if SAVE:
        tma.store_wait(0)
    norm = store_lse(row_max, row_sum, lse_ptr + rows, i0, L, scale_log2, KEEP_PROB, GROUP)
    head_ptr = out_ptr + (b.to(gl.int64) * L * num_heads + h) * OUT_DIM
    store_output(scale_rows(acc, norm), head_ptr, i0, L, num_heads * OUT_DIM, OUT_DIM, GROUP)


@gluon.jit
def _allocate_tiles(k_desc, v_desc, rel_desc, STAGES: gl.constexpr):
    """Allocate the shared-memory tiles of k, v and rel_emb for one head-dimension chunk."""
    dtype: gl.constexpr = k_desc.dtype
    width: gl.constexpr = rel_desc.block_shape[1]
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, width], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, width], v_desc.layout)
    rel_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, width], rel_desc.layout)
    return k_tiles, v_tiles, rel_tiles


@gluon.jit
def forward_kernel(
    q_ptr, k_desc, v_desc, rel_desc, k_desc1, v_desc1, rel_desc1, mask_ptr, query_bits_ptr,
    pair_bits_ptr, out_ptr, lse_ptr, num_heads, L, N, span, scale_log2, limit,
    saved_desc, row_max_ptr, saved_key,
    HAS_MASK: gl.constexpr, KEEP_PROB: gl.constexpr, SAVE: gl.constexpr, P: gl.constexpr,
    HEAD_DIM: gl.constexpr, OUT_DIM: gl.constexpr, WORDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the output and logsumexp of 128 queries of one head; allocate and start the warps.

    SAVE: also store the weights, whose buffer starts at key `saved_key`. The second descriptors
    (k_desc1 ..) are those of the second head-dimension chunk, unused where there is one chunk.
    """
    dtype: gl.constexpr = k_desc.dtype
    descs = ((k_desc, v_desc, rel_desc), (k_desc1, v_desc1, rel_desc1))
    tiles = (_allocate_tiles(k_desc, v_desc, rel_desc, STAGES),)
    if HEAD_DIM == CHUNKED_DIM:
        tiles = (tiles[0], _allocate_tiles(k_desc1, v_desc1, rel_desc1, STAGES))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    staging0 = gl.allocate_shared_memory(gl.int32, [WORDS, 1], flat)
    staging1 = gl.allocate_shared_memory(gl.int32, [WORDS, 1], flat)
    full, empty = make_barriers(STAGES, len(tiles), 2)
    pipeline = (descs, tiles, full, empty)
    saved = (saved_desc, row_max_ptr, saved_key)
    weight_staging = full  # a placeholder, unused
    if SAVE:
        weight_staging = gl.allocate_shared_memory(dtype, [2, 1, 1, 4, 16, KEYS], saved_desc.layout)
    gl.warp_specialize(
        [
            (_warpgroup, (
                q_ptr, pipeline, staging0, weight_staging.index(0), mask_ptr, query_bits_ptr,
                pair_bits_ptr, out_ptr, lse_ptr, saved, num_heads, L, N, span, scale_log2, limit,
                HAS_MASK, KEEP_PROB, SAVE, P, HEAD_DIM, OUT_DIM, gl.constexpr(0),
            )),
            (_warpgroup, (
                q_ptr, pipeline, staging1, weight_staging.index(1), mask_ptr, query_bits_ptr,
                pair_bits_ptr, out_ptr, lse_ptr, saved, num_heads, L, N, span, scale_log2, limit,
                HAS_MASK, KEEP_PROB, SAVE, P, HEAD_DIM, OUT_DIM, gl.constexpr(1),
            )),
        ],
        [4],
        [128],
    )  # fmt: skip


def shared_bytes(features: int, span: int) -> int:
    """Return the bytes of shared memory of a program: score staging of both warpgroups, tiles,
    weight staging, and 1 KB for mbarriers."""
    width = triton.next_power_of_2(features)
    first, second = chunk_widths(features, width)
    tile_bytes = 64 * 2 * (width if first == width else first + second)
    return 2 * 4 * staging_words(span) + _STAGES * 3 * tile_bytes + 2 * STAGING_BYTES + 1024


def run_forward(given: Inputs, saved: SavedWeights) -> tuple[Tensor, Tensor]:
    """Return the (B, H, L, `features`) output, laid out by `empty_output`, and the (B, H, L) lse.

    Fill `saved` unless it is empty.
    """
    q, k, v, rel_emb, key_mask, query_bits, scale, dropout, features = given
    batch, heads, num_queries, width = q.shape
    num_keys, span = k.shape[2], rel_emb.shape[1]
    save = saved.weights.numel() > 0
    assert not save or (num_queries % 8 == 0 and saved.weights.numel() < 2**31)
    skew = saved_layout(q.shape, num_keys, span)
    widths = chunk_widths(features, width)
    out = empty_output(q, features)
    lse = torch.empty(q.shape[:3], device=q.device)
    threshold = drop_threshold_paired(dropout)
    bits = torch.empty(triton.cdiv(num_keys, 64) * 32, dtype=torch.int32, device=q.device)
    if threshold > 0:
        pair_bits_kernel[(triton.cdiv(bits.numel(), 1024),)](bits, bits.numel(), BN=1024)
    rel_emb_WP = torch.empty(span, width, dtype=q.dtype, device=q.device).copy_(rel_emb.T)
    forward_kernel[(triton.cdiv(num_queries, 128) * batch * heads,)](
        q,
        *(tile_descriptor(t, features, chunk) for chunk in widths for t in (k, v, rel_emb_WP)),
        q if key_mask is None else key_mask.to(torch.uint8),
        *(query_bits, bits, out, lse, heads, num_queries, num_keys, span, scale * LOG2E),
        packed_limit(threshold),
        *(
            (store_descriptor(saved.weights, skew, batch * heads), saved.row_max)
            if save
            else (out, lse)
        ),
        first_saved_key(skew),
        HAS_MASK=key_mask is not None,
        KEEP_PROB=1 - threshold / 2**32,
        SAVE=save,
        P=width,
        HEAD_DIM=triton.cdiv(features, 16) * 16,
        OUT_DIM=features,
        WORDS=staging_words(span),
        STAGES=_STAGES,
        num_warps=4,
        maxnreg=128,  # two programs per SM
    )
    return out, lse
