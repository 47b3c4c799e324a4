"""Gradients of keys and values of sliding-window attention on Hopper, from saved weights.

For each head, with prob from the weights that the forward saved (saved_weights.py):

    dprob = grad_out @ v^T,  dscore = prob * keep_mask * dprob - prob * delta
    dv = dv_scale * (prob * keep_mask)^T @ grad_out,  dk = dk_scale * dscore^T @ q

The kernel is memory-bound: for each 64 x 64 tile of queries and keys it reads the weights and
writes dscore, 16 KB. One program per SM therefore keeps many tiles in flight:

    3 consumer warpgroups   each takes its own tile of keys and loops over the query tiles that see
                            it
    3 producer warps        one per consumer: load its weights into a multistage TMA pipeline; a
                            stage is free once TMA has read the dscore that replaced the weights
    1 producer warp         loads q, grad_out, lse and delta; shared memory holds all queries of a
                            head, and this warp loads those of the next head

All tiles are transposed, with keys as rows and queries as columns: prob and dscore are then the
left operands of the next GEMMs, and stay in registers.

A tile of weights is one TMA box of a 4-dimensional tensor (head, row, plane, key) whose rows
overlap: eight queries further is one row further and 8 columns to the left (triton/skew.py).
Weights outside the window are zero and give zero gradients, so there is no window mask.

Shapes: B batch, H heads, X = B * H, L queries, S keys before the first query, N = S + L keys,
W window, P head dimension, of which the first HEAD_DIM (P, or 48 of 64) are multiplied.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from acmoe.ops.attention.hopper.gemm import CHUNKED_DIM, zero_accumulators
from acmoe.ops.attention.hopper.keys_gemm import (
    SCORE_T,
    chunks_of,
    load_values,
    multiplied_dim,
    start_dprob_gemm,
    start_grad_gemm,
    store_gradient,
    wait_gradients,
)
from acmoe.ops.attention.hopper.keys_loads import (
    BLOCK,
    CONSUMERS,
    grad_descriptor,
    key_tile,
    produce_queries,
    produce_weights,
    query_descriptor,
    query_tile_range,
    release_queries,
    tile_schedule,
    vector_descriptor,
    weight_descriptor,
)
from acmoe.ops.attention.hopper.saved_weights import SavedWeights
from acmoe.ops.attention.triton.skew import SKEW, SkewLayout
from acmoe.ops.device.gluon_blocks import make_barriers, make_buffers
from acmoe.ops.device.gluon_names import reinterpret, store_tile
from acmoe.ops.device.hopper import SHARED_BYTES

_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_MAX_STAGES = 6
_STAGE_BYTES = 64 * 64 * 2 + 64 * 4 + 16  # a tile of weights, its row maxima and two mbarriers


@gluon.jit
def _load_columns(vectors, index):
    """Load one number for each query of a tile, in the layout of a row over the tile's columns."""
    flat = reinterpret(vectors.index(index), gl.float32, [BLOCK], _FLAT)
    return flat.load(gl.SliceLayout(0, SCORE_T))


@gluon.jit
def _accumulate_tile(v, dk, dv, pipeline, iteration, query_tiles, t, dscore_desc, offsets):
    """Add query tile t to dk and dv of a tile of keys, and store its dscore over the weights."""
    q_tiles, grad_tiles, lse, delta = query_tiles
    tiles, row_max, full, empty = pipeline
    stages: gl.constexpr = tiles.shape[0]
    dtype: gl.constexpr = tiles.dtype
    stage = iteration % stages
    dprob = start_dprob_gemm(v, grad_tiles, t)
    mbarrier.wait(full.index(stage), iteration // stages & 1)
    # The row maximum of a query that has seen no key yet is stored as 0, which may be far above its
    # lse; its weights are 0. The minimum avoids an overflow.
    norm = gl.exp2(gl.minimum(_load_columns(row_max, stage) - _load_columns(lse, t), 0.0))
    dprob = warpgroup_mma_wait(0, deps=[dprob])
    tile = tiles.index(stage).reshape([BLOCK, BLOCK]).permute([1, 0])
    prob = tile.load(SCORE_T).to(gl.float32) * norm[None, :]
    kept_prob = gl.maximum(prob, 0.0)  # negative: dropped by dropout
    dscore = kept_prob * dprob - gl.abs(prob) * _load_columns(delta, t)[None, :]
    dscore = dscore.to(dtype)
    dv = start_grad_gemm(dv, kept_prob.to(dtype), grad_tiles, t)
    dk = start_grad_gemm(dk, dscore, q_tiles, t)
    tma.store_wait(0)
    mbarrier.arrive(empty.index((iteration + stages - 1) % stages), count=1, pred=iteration > 0)
    tile.store(dscore)
    fence_async_shared()
    store_tile(dscore_desc, offsets, tiles.index(stage))
    return wait_gradients(dk, dv)


@gluon.jit
def _consumer(pipeline, work, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr):
    """Compute dk, dv and dscore of every third tile of the program's keys."""
    queries, dscore_desc, pointers, strides, scales, schedule, num_heads = work
    query_tiles, full, empty = queries
    v_ptr, dk_ptr, dv_ptr = pointers
    k_batch, k_head, k_stride, v_batch, v_head, v_stride = strides
    first, end, heads, _, N, _ = schedule
    per_head: gl.constexpr = full.shape[0]
    iteration = 0
    released = 0
    for n in range(GROUP, heads * (end - first), CONSUMERS):
        head_index, x, j0 = key_tile(n, schedule)
        b, h = (x // num_heads).to(gl.int64), x % num_heads
        k_start = b * k_batch + h * k_head
        v_start = b * v_batch + h * v_head
        v = load_values(v_ptr + v_start, j0, N, v_stride, HEAD_DIM)
        low, high = query_tile_range(j0, schedule)
        released = release_queries(released, head_index * per_head + low, full, empty)
        dk = zero_accumulators(HEAD_DIM)
        dv = zero_accumulators(HEAD_DIM)
        for t in range(low, high):
            mbarrier.wait(full.index(t), head_index & 1)
            offsets = [x, t * SKEW, 0, j0]
            dk, dv = _accumulate_tile(
                v, dk, dv, pipeline, iteration, query_tiles, t, dscore_desc, offsets
            )
            iteration += 1
        store_gradient(dk, dk_ptr + k_start, j0, N, k_stride, scales[0])
        store_gradient(dv, dv_ptr + v_start, j0, N, v_stride, scales[1])
    tma.store_wait(0)
    release_queries(released, heads * per_head, full, empty)


@gluon.jit
def _allocate_pipeline(weight_desc, max_desc, STAGES: gl.constexpr):
    """Allocate one consumer's pipeline: weight tiles, row maxima and mbarriers."""
    full, empty = make_barriers(STAGES, 1, 1)
    return make_buffers(STAGES, weight_desc), make_buffers(STAGES, max_desc), full, empty


@gluon.jit
def keys_kernel(
    weight_desc, dscore_desc, max_desc, q_desc, q_desc1, grad_desc, grad_desc1, lse_desc,
    delta_desc, v_ptr, dk_ptr, dv_ptr, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    num, num_heads, L, N, span, dk_scale, dv_scale,
    HEAD_DIM: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute dk, dv and dscore for a program's share of the heads; allocate and start the warps.

    q_desc1 and grad_desc1 describe the second head-dimension chunk, and are unused with one chunk.
    """
    schedule = tile_schedule(num, L, N, span)
    q_tiles = (make_buffers(TILES, q_desc),)
    grad_tiles = (make_buffers(TILES, grad_desc),)
    q_loads = ((q_desc, q_tiles[0]),)
    grad_loads = ((grad_desc, grad_tiles[0]),)
    if HEAD_DIM == CHUNKED_DIM:
        q_tiles += (make_buffers(TILES, q_desc1),)
        grad_tiles += (make_buffers(TILES, grad_desc1),)
        q_loads += ((q_desc1, q_tiles[1]),)
        grad_loads += ((grad_desc1, grad_tiles[1]),)
    lse, delta = make_buffers(TILES, lse_desc), make_buffers(TILES, delta_desc)
    vector_loads = ((lse_desc, lse), (delta_desc, delta))
    full, empty = make_barriers(TILES, 1, CONSUMERS)
    queries = ((q_tiles, grad_tiles, lse, delta), full, empty)
    pipeline0 = _allocate_pipeline(weight_desc, max_desc, STAGES)
    pipeline1 = _allocate_pipeline(weight_desc, max_desc, STAGES)
    pipeline2 = _allocate_pipeline(weight_desc, max_desc, STAGES)
    pointers = (v_ptr, dk_ptr, dv_ptr)
    strides = (k_batch, k_head, k_stride, v_batch, v_head, v_stride)
    work = (queries, dscore_desc, pointers, strides, (dk_scale, dv_scale), schedule, num_heads)
    tile_bytes: gl.constexpr = BLOCK * (2 * 2 * HEAD_DIM + 2 * 4)
    gl.warp_specialize(
        [
            (_consumer, (pipeline0, work, HEAD_DIM, gl.constexpr(0))),
            (_consumer, (pipeline1, work, HEAD_DIM, gl.constexpr(1))),
            (_consumer, (pipeline2, work, HEAD_DIM, gl.constexpr(2))),
            (produce_weights, (weight_desc, max_desc, pipeline0, schedule, gl.constexpr(0))),
            (produce_weights, (weight_desc, max_desc, pipeline1, schedule, gl.constexpr(1))),
            (produce_weights, (weight_desc, max_desc, pipeline2, schedule, gl.constexpr(2))),
            (produce_queries, (
                q_loads, grad_loads, vector_loads, num_heads, full, empty, schedule, tile_bytes,
                HEAD_DIM,
            )),
        ],
        [4, 4, 1, 1, 1, 1],
        [160, 160, 24, 24, 24, 24],
    )  # fmt: skip


def pipeline_stages(width: int, features: int, queries: int) -> int:
    """Return the stages of each consumer's pipeline that fit beside all queries of a head.

    Fewer than two: the head has too many queries for this kernel.
    """
    tile_bytes = 64 * (2 * 2 * multiplied_dim(width, features) + 2 * 4) + 16
    free_bytes = SHARED_BYTES - triton.cdiv(queries, 64) * tile_bytes - 1024
    return min(_MAX_STAGES, free_bytes // (CONSUMERS.value * _STAGE_BYTES))


def _grid(num: int, tiles: int, device: torch.device) -> tuple[int, int]:
    """Return the heads that run at a time, and the programs that split the keys of each.

    The grid has at most one program per SM; two programs where the kernel is emulated.
    """
    programs = 2
    if device.type == "cuda":
        programs = torch.cuda.get_device_properties(device).multi_processor_count
    return min(num, programs), max(1, min(programs // num, tiles // CONSUMERS.value))


class Upstream(NamedTuple):
    """The gradient of the output, and the numbers of each query that `run_keys` reads with it."""

    grad_out: Tensor  # (B, H, L, `stored_width`), laid out by `empty_output`
    lse: Tensor  # (B, H, L)
    delta: Tensor  # (B, H, L)


class KeyGradients(NamedTuple):
    """The buffers that `run_keys` fills, and the factors of two of them."""

    dscores: Tensor  # in the layout of the saved weights
    dk: Tensor  # (B, H, N, `stored_width`) with feature stride 1, as dv
    dv: Tensor
    dk_scale: float
    dv_scale: float


def run_keys(
    q: Tensor,
    v: Tensor,
    upstream: Upstream,
    saved: SavedWeights,
    found: KeyGradients,
    skew: SkewLayout,
    features: int,
) -> None:
    """Fill the tensors of `found`.

    q (B, H, L, P) is contiguous; v (B, H, N, `stored_width`) has the strides of dk and dv. Of
    dscores, tiles of 64 queries and 64 keys that meet the window are stored whole, with zeros
    outside the window; the rest is not written.
    """
    grad_out, lse, delta = upstream
    dscores, dk, dv, dk_scale, dv_scale = found
    assert dv.stride() == v.stride()
    batch, heads, num_queries, width = q.shape
    num = batch * heads
    head_dim = multiplied_dim(width, features)
    chunks = chunks_of(head_dim)
    assert grad_out.shape[3] == head_dim
    descriptors = [
        describe(t, *chunk)
        for describe, t in ((query_descriptor, q), (grad_descriptor, grad_out))
        for chunk in (chunks[0], chunks[-1])
    ]
    vectors = (vector_descriptor(t.view(num, num_queries)) for t in (lse, delta))
    keys_kernel[_grid(num, triton.cdiv(skew.keys, 64), q.device)](
        *(weight_descriptor(t, num, skew) for t in (saved.weights, dscores)),
        vector_descriptor(saved.row_max.view(num, -1, num_queries)),
        *(*descriptors, *vectors, v, dk, dv),
        *(*dk.stride()[:3], *dv.stride()[:3], num, heads, num_queries, skew.keys, skew.span),
        *(dk_scale, dv_scale),
        HEAD_DIM=head_dim,
        TILES=triton.cdiv(num_queries, 64),
        STAGES=pipeline_stages(width, features, num_queries),
        num_warps=4,
        maxnreg=128,
    )
