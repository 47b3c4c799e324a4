"""The forward of attention to a window on Hopper, which multiplies queries and positions itself.

attention.py reads those products from memory, where another kernel has put them. Here a program of
128 queries makes them as it walks over the keys: one tile of 64 keys on needs 64 more columns of
the table. They wait in shared memory for the keys they meet: see attention_strip.py.

Two warpgroups, of every second query each, share the tiles of keys, values and table, which the
copy engine fetches a step ahead. They run without each other: where one waits for the matrix units
the other has exponentials to take.

Weights are kept for the backward as attention_keep.py writes them.

B streams, H heads, X = B * H, L queries, S keys before them, N = S + L, W distances in reach, P
features of a head, of which the first FEATURES, a multiple of 16, are read and the REAL ones
written.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from acmoe.ops.attention.hopper.dropout import (
    dropped_out,
    pairs_kernel,
    pairs_of,
    row_terms,
    signed_and_dropped_out,
)
from acmoe.ops.attention.hopper.gemm import (
    FIRST,
    SECOND,
    gathered,
    nothing_gathered,
    part_widths,
    plus_values,
    queries_of,
    scaled,
    tile_at,
    times,
    write,
)
from acmoe.ops.attention.hopper.loads import await_tiles, feed, tiles_of, walk_of
from acmoe.ops.attention.hopper.save_weights import (
    STAGED_BYTES,
    first_key,
    keep_base,
    keep_weights,
    kept_tiles,
    stage_weights,
)
from acmoe.ops.attention.hopper.saved_weights import Kept, kept_band
from acmoe.ops.attention.hopper.softmax import in_sight, nothing_summed, shares, write_sums
from acmoe.ops.attention.hopper.staging import (
    KEYS,
    QUERIES,
    ROWS,
    SCORE,
    keep_products,
    query_of,
    skewed_products,
    strip_words,
)
from acmoe.ops.attention.triton.forward import LOG2E
from acmoe.ops.attention.triton.output import empty_output
from acmoe.ops.device.dropout_rng import packed_limit, pair_threshold

_STAGES = 2  # tiles of keys, values and table; three would leave one program an SM


@gluon.jit
def _first_products(q, strip, walk, b, h, loads, GROUP: gl.constexpr):
    """The columns that the first tile of keys meets, but for the last."""
    _, tiles, full, empty = loads
    _, _, _, first = walk
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    if len(tiles) > GROUP:
        feed(first, walk, b, h, loads, GROUP)
    for s in range(first, 0):
        if len(tiles) > GROUP:
            feed(s + 1, walk, b, h, loads, GROUP)
        at = await_tiles(s, first, full)
        product = times(q, tile_at(tiles, 2, at), nothing, False)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(at), count=1)
        keep_products(strip, s + 3, product, q[0].dtype)


@gluon.jit
def _tossed(weight, factor, term, pairs_ptr, limit, KEPT: gl.constexpr, KEEPS: gl.constexpr):
    """Weights as they are kept, and as they multiply values."""
    signed = weight
    if KEPT < 1:
        if KEEPS:
            pairs = pairs_of(pairs_ptr)
            signed, weight = signed_and_dropped_out(weight, factor, term, pairs, limit)
        else:
            weight = dropped_out(weight, factor, term, pairs_of(pairs_ptr), limit)
    return signed, weight


@gluon.jit
def _group(
    q_ptr, loads, strip, staged, mask_ptr, bits_ptr, spread_ptr, out_ptr, lse_ptr, keep,
    num_heads, L, N, span, steep, limit, HAS_MASK: gl.constexpr,
    KEPT: gl.constexpr, KEEPS: gl.constexpr, P: gl.constexpr, FEATURES: gl.constexpr,
    REAL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """64 of a program's queries: every second one. Each group fetches one part of the tiles for
    both."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    _, shared_tiles, full, empty = loads
    tiles = gl.cdiv(L, QUERIES)
    x, i0 = gl.program_id(0) // tiles, gl.program_id(0) % tiles * QUERIES
    b, h, rows = x // num_heads, x % num_heads, x.to(gl.int64) * L
    walk = walk_of(i0, L, N, span)
    start, steps, _, first = walk
    inner = N - L + i0 + QUERIES - 1 - span
    outer = gl.where(i0 + QUERIES <= L, N - L + i0 - KEYS, -1)
    i = i0 + query_of(gl.arange(0, ROWS, gl.SliceLayout(1, SCORE)), GROUP)
    before = gl.where(i < L, N - L - 1 + i, -1)
    factor, term = i, i
    if KEPT < 1:
        factor, term = row_terms(gl.load(bits_ptr + rows + i, mask=i < L, other=0))
    q = queries_of(q_ptr + rows * P, i0, L, P, FEATURES, GROUP)
    peak = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORE))
    total = nothing_summed()
    acc = nothing_gathered(FEATURES)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    _first_products(q, strip, walk, b, h, loads, GROUP)
    for s in range(0, steps):
        j0 = start + s * KEYS
        score = skewed_products(strip, s, dtype, GROUP)
        at = await_tiles(s, first, full)
        score = times(q, tile_at(shared_tiles, 0, at), score, True)
        if len(shared_tiles) > GROUP:
            if s + 1 < steps:
                feed(s + 1, walk, b, h, loads, GROUP)
        score = warpgroup_mma_wait(0, deps=[score])
        seen_ptr = mask_ptr + b.to(gl.int64) * N
        score = in_sight(score, before, j0, inner, outer, span, seen_ptr, N, HAS_MASK)
        weight, base, shrink, peak, total = shares(score, peak, total, steep)
        pairs_ptr = spread_ptr + j0 // 2
        signed, weight = _tossed(weight.to(dtype), factor, term, pairs_ptr, limit, KEPT, KEEPS)
        if KEEPS:
            stage_weights(staged, signed)
            keep_base(keep[1], base, rows, i0, j0, L, N, GROUP)
        acc = scaled(acc, shrink)
        # The table's product first: it is written while the values' runs.
        product = times(q, tile_at(shared_tiles, 2, at), nothing, False)
        acc = plus_values(acc, weight, tile_at(shared_tiles, 1, at))
        if KEEPS:
            keep_weights(keep[0], staged, x, i0, j0 - keep[2], GROUP)
        product = warpgroup_mma_wait(len(acc), deps=[product])
        keep_products(strip, s + 3, product, dtype)
        acc = gathered(acc)
        mbarrier.arrive(empty.index(at), count=1)
    if KEEPS:
        tma.store_wait(0)
    share = write_sums(peak, total, lse_ptr + rows, i0, L, steep, KEPT, GROUP)
    first_out = out_ptr + (b.to(gl.int64) * L * num_heads + h) * REAL
    write(scaled(acc, share), first_out, i0, L, num_heads * REAL, REAL, GROUP)


@gluon.jit
def _room_for(k_desc, v_desc, table_desc, STAGES: gl.constexpr):
    """For one part of the tiles of keys, values and table."""
    dtype: gl.constexpr = k_desc.dtype
    width: gl.constexpr = table_desc.block_shape[1]
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, width], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, width], v_desc.layout)
    table_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, width], table_desc.layout)
    return k_tiles, v_tiles, table_tiles


@gluon.jit
def forward_kernel(
    q_ptr, k_desc, v_desc, table_desc, k_rest, v_rest, table_rest, mask_ptr, bits_ptr, spread_ptr,
    out_ptr, lse_ptr,
    num_heads, L, N, span, steep, limit,
    kept_desc, base_ptr, origin,
    HAS_MASK: gl.constexpr, KEPT: gl.constexpr, KEEPS: gl.constexpr, P: gl.constexpr,
    FEATURES: gl.constexpr, REAL: gl.constexpr, WORDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What `forward_kernel` of attention.py gives, for 128 queries of a head. KEEPS: the weights
    are written as well, from key `origin` on. Of heads in one part the `rest` is not read."""
    dtype: gl.constexpr = k_desc.dtype
    descs = ((k_desc, v_desc, table_desc), (k_rest, v_rest, table_rest))
    tiles = (_room_for(k_desc, v_desc, table_desc, STAGES),)
    if FEATURES == FIRST + SECOND:
        tiles = (tiles[0], _room_for(k_rest, v_rest, table_rest, STAGES))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    even = gl.allocate_shared_memory(gl.int32, [WORDS, 1], flat)
    odd = gl.allocate_shared_memory(gl.int32, [WORDS, 1], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=len(tiles))
        mbarrier.init(empty.index(stage), count=2)
    loads = (descs, tiles, full, empty)
    keep = (kept_desc, base_ptr, origin)
    staged = full  # never looked at
    if KEEPS:
        staged = gl.allocate_shared_memory(dtype, [2, 1, 1, 4, 16, KEYS], kept_desc.layout)
    gl.warp_specialize(
        [
            (_group, (
                q_ptr, loads, even, staged.index(0), mask_ptr, bits_ptr, spread_ptr, out_ptr,
                lse_ptr, keep, num_heads, L, N, span, steep, limit, HAS_MASK, KEPT,
                KEEPS, P, FEATURES, REAL, gl.constexpr(0),
            )),
            (_group, (
                q_ptr, loads, odd, staged.index(1), mask_ptr, bits_ptr, spread_ptr, out_ptr,
                lse_ptr, keep, num_heads, L, N, span, steep, limit, HAS_MASK, KEPT,
                KEEPS, P, FEATURES, REAL, gl.constexpr(1),
            )),
        ],
        [4],
        [128],
    )  # fmt: skip


def shared_bytes(features: int, span: int) -> int:
    """Shared memory of a program: two strips, the tiles, what weights pass through, and a little
    for barriers."""
    tile_bytes = 64 * 2 * (48 if 32 < features <= 48 else triton.next_power_of_2(features))
    return 2 * 4 * strip_words(span) + _STAGES * 3 * tile_bytes + 2 * STAGED_BYTES + 1024


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    key_mask: Tensor | None,
    bits: Tensor,
    scale: float,
    dropout: float,
    features: int,
    kept: Kept,
) -> tuple[Tensor, Tensor]:
    """(B, H, L, `features`) attended values, as `empty_output` has them, and (B, H, L)
    log2 of each query's sum; the features of a head from `features` on are zeros. `kept` is filled
    if it has room for anything."""
    batch, heads, num_queries, width = q.shape
    num_keys, span = k.shape[2], table.shape[1]
    keeps = kept.weights.numel() > 0
    assert not keeps or (num_queries % 8 == 0 and kept.weights.numel() < 2**31)
    band = kept_band(q.shape, num_keys, span)
    parts = part_widths(features, width)
    out = empty_output(q, features)
    lse = torch.empty(q.shape[:3], device=q.device)
    dropped = pair_threshold(dropout)
    spread = torch.empty(triton.cdiv(num_keys, 64) * 32, dtype=torch.int32, device=q.device)
    if dropped > 0:
        pairs_kernel[(triton.cdiv(spread.numel(), 1024),)](spread, spread.numel(), BN=1024)
    table_WP = torch.empty(span, width, dtype=q.dtype, device=q.device).copy_(table.T)
    forward_kernel[(triton.cdiv(num_queries, 128) * batch * heads,)](
        q,
        *(tiles_of(t, features, part) for part in parts for t in (k, v, table_WP)),
        q if key_mask is None else key_mask.to(torch.uint8),
        *(bits, spread, out, lse, heads, num_queries, num_keys, span, scale * LOG2E),
        packed_limit(dropped),
        *((kept_tiles(kept.weights, band, batch * heads), kept.base) if keeps else (out, lse)),
        first_key(band),
        HAS_MASK=key_mask is not None,
        KEPT=1 - dropped / 2**32,
        KEEPS=keeps,
        P=width,
        FEATURES=triton.cdiv(features, 16) * 16,
        REAL=features,
        WORDS=strip_words(span),
        STAGES=_STAGES,
        num_warps=4,
        maxnreg=128,  # two programs an SM
    )
    return out, lse
