"""Gradients of keys and values of window attention on Hopper, from weights that the forward kept.

The bound is memory: a tile of weights is read, and the scores' gradient written, 16 KB for 64
queries and 64 keys. So a program, one a multiprocessor, keeps many tiles in flight:

    groups      of four warps, each at its own tile of keys, walk over the queries that see it
    weights     a warp for each group runs ahead and fetches them into a ring of shared memory; a
                slot comes back when the copy engine has read the gradient that replaced them
    queries     and their output's gradients lie in shared memory, a head's all at once; one more
                warp brings those of the next head

Everything is computed keys down, queries across: weights and the scores' gradient are then the left
factors of the next products without leaving their registers.

A tile of weights is one box of a tensor of four dimensions, heads, rows, planes and keys, whose
rows overlap: eight queries on is one row on, and one comb to the left (attention_skew.py). Around
the window lie zeros, which give zeros: no entry asks whether it is in the window.

B streams, H heads, X = B * H, L queries, S keys before them, N = S + L, W distances in reach, P
features of a head, of which the first FEATURES, P or 48 of 64, are multiplied.
"""

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

from acmoe.ops.attention.hopper.gemm import nothing_gathered
from acmoe.ops.attention.hopper.keys_gemm import (
    IN_PARTS,
    SQUARE,
    features_in,
    finished,
    parts_of,
    plus_rows,
    times_values,
    values_of,
    write,
)
from acmoe.ops.attention.hopper.keys_loads import (
    BLOCK,
    COMB,
    GROUPS,
    fetch_queries,
    fetch_weights,
    give_back,
    grads_box,
    numbers_box,
    place_of,
    queries_for,
    rows_box,
    walk_of,
    weights_box,
)
from acmoe.ops.attention.hopper.saved_weights import Kept
from acmoe.ops.attention.triton.skew import Band
from acmoe.ops.device.gluon_names import seen_as, store_tile

_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_MOST_SHARED = 227 * 1024
_MOST_STAGES = 6
_SLOT = 64 * 64 * 2 + 64 * 4 + 16  # bytes of a tile of weights, its bases and two barriers


@gluon.jit
def _across(numbers, index):
    """A number for each query of a tile."""
    flat = seen_as(numbers.index(index), gl.float32, [BLOCK], _FLAT)
    return flat.load(gl.SliceLayout(0, SQUARE))


@gluon.jit
def _tile(v, dk, dv, ring, at, places, t, dscore_desc, corner):
    """What a tile of queries adds to the gradients of a tile of keys and values."""
    q_tiles, grad_tiles, lse, delta = places
    tiles, bases, full, empty = ring
    stages: gl.constexpr = tiles.shape[0]
    dtype: gl.constexpr = tiles.dtype
    slot = at % stages
    dweight = times_values(v, grad_tiles, t)
    mbarrier.wait(full.index(slot), at // stages & 1)
    # A query that has seen nothing yet has base 0, maybe far above its sum, and weights of 0.
    share = gl.exp2(gl.minimum(_across(bases, slot) - _across(lse, t), 0.0))
    dweight = warpgroup_mma_wait(0, deps=[dweight])
    tile = tiles.index(slot).reshape([BLOCK, BLOCK]).permute([1, 0])
    weight = tile.load(SQUARE).to(gl.float32) * share[None, :]
    left = gl.maximum(weight, 0.0)  # a negative one was dropped
    dscore = left * dweight - gl.abs(weight) * _across(delta, t)[None, :]
    dscore = dscore.to(dtype)
    dv = plus_rows(dv, left.to(dtype), grad_tiles, t)
    dk = plus_rows(dk, dscore, q_tiles, t)
    tma.store_wait(0)
    mbarrier.arrive(empty.index((at + stages - 1) % stages), count=1, pred=at > 0)
    tile.store(dscore)
    fence_async_shared()
    store_tile(dscore_desc, corner, tiles.index(slot))
    return finished(dk, dv)


@gluon.jit
def _group(ring, work, FEATURES: gl.constexpr, GROUP: gl.constexpr):
    """Every third tile of a program's keys."""
    queries, dscore_desc, pointers, steps, scales, walk, num_heads = work
    places, full, empty = queries
    v_ptr, dk_ptr, dv_ptr = pointers
    k_batch, k_head, k_stride, v_batch, v_head, v_stride = steps
    first, end, heads, _, N, _ = walk
    per_head: gl.constexpr = full.shape[0]
    at = 0
    given = 0
    for n in range(GROUP, heads * (end - first), GROUPS):
        turn, x, j0 = place_of(n, walk)
        b, h = (x // num_heads).to(gl.int64), x % num_heads
        k_start = b * k_batch + h * k_head
        v_start = b * v_batch + h * v_head
        v = values_of(v_ptr + v_start, j0, N, v_stride, FEATURES)
        low, high = queries_for(j0, walk)
        given = give_back(given, turn * per_head + low, full, empty)
        dk = nothing_gathered(FEATURES)
        dv = nothing_gathered(FEATURES)
        for t in range(low, high):
            mbarrier.wait(full.index(t), turn & 1)
            corner = [x, t * COMB, 0, j0]
            dk, dv = _tile(v, dk, dv, ring, at, places, t, dscore_desc, corner)
            at += 1
        write(dk, dk_ptr + k_start, j0, N, k_stride, scales[0])
        write(dv, dv_ptr + v_start, j0, N, v_stride, scales[1])
    tma.store_wait(0)
    give_back(given, heads * per_head, full, empty)


@gluon.jit
def _barriers(NUMBER: gl.constexpr, READERS: gl.constexpr):
    """A pair for each place: full, and empty when all its readers say so."""
    full = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def _buffers(desc, NUMBER: gl.constexpr):
    shape: gl.constexpr = [NUMBER] + desc.block_shape  # noqa: RUF005
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def _ring(kept_desc, base_desc, STAGES: gl.constexpr):
    full, empty = _barriers(STAGES, 1)
    return _buffers(kept_desc, STAGES), _buffers(base_desc, STAGES), full, empty


@gluon.jit
def keys_kernel(
    kept_desc, dscore_desc, base_desc, q_desc, q_rest, grad_desc, grad_rest, lse_desc,
    delta_desc, v_ptr, dk_ptr, dv_ptr, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    num, num_heads, L, N, span, dk_scale, dv_scale,
    FEATURES: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk, dv and the scores' gradient, for some heads."""
    walk = walk_of(num, L, N, span)
    q_tiles = (_buffers(q_desc, TILES),)
    grad_tiles = (_buffers(grad_desc, TILES),)
    rows = ((q_desc, q_tiles[0]),)
    grads = ((grad_desc, grad_tiles[0]),)
    if FEATURES == IN_PARTS:
        q_tiles += (_buffers(q_rest, TILES),)
        grad_tiles += (_buffers(grad_rest, TILES),)
        rows += ((q_rest, q_tiles[1]),)
        grads += ((grad_rest, grad_tiles[1]),)
    lse, delta = _buffers(lse_desc, TILES), _buffers(delta_desc, TILES)
    numbers = ((lse_desc, lse), (delta_desc, delta))
    full, empty = _barriers(TILES, GROUPS)
    queries = ((q_tiles, grad_tiles, lse, delta), full, empty)
    ring0 = _ring(kept_desc, base_desc, STAGES)
    ring1 = _ring(kept_desc, base_desc, STAGES)
    ring2 = _ring(kept_desc, base_desc, STAGES)
    pointers = (v_ptr, dk_ptr, dv_ptr)
    steps = (k_batch, k_head, k_stride, v_batch, v_head, v_stride)
    work = (queries, dscore_desc, pointers, steps, (dk_scale, dv_scale), walk, num_heads)
    bytes_of_tile: gl.constexpr = BLOCK * (2 * 2 * FEATURES + 2 * 4)
    gl.warp_specialize(
        [
            (_group, (ring0, work, FEATURES, gl.constexpr(0))),
            (_group, (ring1, work, FEATURES, gl.constexpr(1))),
            (_group, (ring2, work, FEATURES, gl.constexpr(2))),
            (fetch_weights, (kept_desc, base_desc, ring0, walk, gl.constexpr(0))),
            (fetch_weights, (kept_desc, base_desc, ring1, walk, gl.constexpr(1))),
            (fetch_weights, (kept_desc, base_desc, ring2, walk, gl.constexpr(2))),
            (
                fetch_queries,
                (
                    rows,
                    grads,
                    numbers,
                    num_heads,
                    full,
                    empty,
                    walk,
                    bytes_of_tile,
                    FEATURES,
                ),
            ),
        ],
        [4, 4, 1, 1, 1, 1],
        [160, 160, 24, 24, 24, 24],
    )


def stages_for(width: int, features: int, queries: int) -> int:
    """Weights a group's ring has room for beside a head's queries; fewer than two: too many
    queries."""
    tile = 64 * (2 * 2 * features_in(width, features) + 2 * 4) + 16
    room = _MOST_SHARED - triton.cdiv(queries, 64) * tile - 1024
    return min(_MOST_STAGES, room // (GROUPS.value * _SLOT))


def _programs(num: int, tiles: int, device: torch.device) -> tuple[int, int]:
    """One a multiprocessor: heads that run at a time, and shares of each one's keys. Where the
    kernel is emulated two."""
    most = 2
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).multi_processor_count
    return min(num, most), max(1, min(most // num, tiles // GROUPS.value))


def run_keys(
    q: Tensor,
    v: Tensor,
    grad: Tensor,
    kept: Kept,
    lse: Tensor,
    delta: Tensor,
    dscores: Tensor,
    dk: Tensor,
    dv: Tensor,
    band: Band,
    dk_scale: float,
    dv_scale: float,
    features: int,
) -> None:
    """Fill dk, dv and the gradient of the scores.

    q (B, H, L, P) is contiguous, grad (B, H, L, `stored_width`) as `empty_output` has it; v, dk and
    dv (B, H, N, `stored_width`) have features side by side; lse and delta (B, H, L). dscores lies
    as the weights do: tiles of 64 queries and 64 keys that meet the window are written whole, with
    zeros outside it, and nothing else is.
    """
    assert dv.stride() == v.stride()
    batch, heads, num_queries, width = q.shape
    num = batch * heads
    used = features_in(width, features)
    parts = parts_of(used)
    assert grad.shape[3] == used
    boxes = [
        box(t, *part)
        for box, t in ((rows_box, q), (grads_box, grad))
        for part in (parts[0], parts[-1])
    ]
    numbers = (numbers_box(t.view(num, num_queries)) for t in (lse, delta))
    keys_kernel[_programs(num, triton.cdiv(band.keys, 64), q.device)](
        *(weights_box(t, num, band) for t in (kept.weights, dscores)),
        *(numbers_box(kept.base.view(num, -1, num_queries)), *boxes, *numbers, v, dk, dv),
        *(*dk.stride()[:3], *dv.stride()[:3], num, heads, num_queries, band.keys, band.span),
        *(dk_scale, dv_scale),
        FEATURES=used,
        TILES=triton.cdiv(num_queries, 64),
        STAGES=stages_for(width, features, num_queries),
        num_warps=4,
        maxnreg=128,
    )
