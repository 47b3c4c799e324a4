"""Gradient of the router's tokens on Hopper, for many experts.

    d x (T, D) = (d affinity @ embedding) * scale of the token's cluster + addend

d affinity (2, T, E) is a bf16x2 split. The result is rounded to bf16, so that the tensor cores may
add up everything. A persistent kernel with the ping-pong schedule of ops/experts/hopper/pipeline.py
over tiles of 128 tokens and 128 features: while one consumer finishes and stores its tile, the
other multiplies.

Both parts of d affinity meet the same block of embeddings, which is loaded once for both: 48 KiB
for 1,024 cycles of MMAs. Two blocks of one part each would be 64 KiB, all that L2 can give to a
multiprocessor in these cycles (64 bytes a cycle), and scales and addends come on top.

A tile is finished in four panels of 64 tokens and 64 features. A second producer warp loads the
addend's panels by TMA while the tile is multiplied; a result takes the place of its addend in
shared memory, from which TMA stores it. The scales of a panel are loaded to the registers that
hold its sums, one panel ahead.

T tokens, D features, E experts, C clusters.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from acmoe.ops.device.gluon_blocks import (
    HALF_M,
    PANEL,
    acc_layout,
    make_barriers,
    make_buffers,
    split_panels,
    wait_ping_pong,
)
from acmoe.ops.device.gluon_names import load_tile, store_tile, thread_barrier
from acmoe.ops.route.hopper.scales import own_scales

TILE = gl.constexpr(128)  # tokens, and features, of a tile
BLOCK = gl.constexpr(64)  # experts of a block
PANELS = gl.constexpr(4)  # panels of a tile: 2 x 2


@gluon.jit
def _load_blocks(load_args):
    """Producer: load the blocks of d affinity and of the embedding of all tiles of the program."""
    grad_desc, embedding_desc, pipeline, T, num_tiles, num_n, num_k = load_args
    grad_bufs, w_bufs, full, empty, _ = pipeline
    STAGES: gl.constexpr = w_bufs.shape[0]
    k_block = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = tile // num_n * TILE, tile % num_n * TILE
        for k in range(num_k):
            stage = k_block % STAGES
            full_bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
            mbarrier.expect(
                full_bar, 2 * grad_desc.block_type.nbytes + embedding_desc.block_type.nbytes
            )
            # Rows after the last token are those of the other part, or zeros; nobody stores them.
            load_tile(grad_desc, [T + row, k * BLOCK], full_bar, grad_bufs.index(2 * stage))
            load_tile(grad_desc, [row, k * BLOCK], full_bar, grad_bufs.index(2 * stage + 1))
            load_tile(embedding_desc, [k * BLOCK, column], full_bar, w_bufs.index(stage))
            k_block += 1


@gluon.jit
def _load_addends(addend_args):
    """Producer: load the addend's panels of all tiles, each to its consumer's buffers."""
    addend_desc, panel_bufs, full, empty, num_tiles, num_n = addend_args
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        local_tile = tile // gl.num_programs(0)
        row, column = tile // num_n * TILE, tile % num_n * TILE
        for panel in range(PANELS):
            at = local_tile % 2 * PANELS + panel
            full_bar = full.index(at)
            mbarrier.wait(empty.index(at), (local_tile // 2 & 1) ^ 1)
            mbarrier.expect(full_bar, addend_desc.block_type.nbytes)
            corner = [row + panel // 2 * HALF_M, column + panel % 2 * PANEL]
            load_tile(addend_desc, corner, full_bar, panel_bufs.index(at))


@gluon.jit
def _multiply(pipeline, local_tile, num_k, CONSUMER: gl.constexpr):
    """Return both halves (64, 128) of the program's local_tile-th tile, as `mma_tile` does."""
    grad_bufs, w_bufs, full, empty, ping_pong = pipeline
    STAGES: gl.constexpr = w_bufs.shape[0]
    upper = gl.zeros([HALF_M, TILE], gl.float32, acc_layout(TILE))
    lower = gl.zeros([HALF_M, TILE], gl.float32, acc_layout(TILE))
    wait_ping_pong(ping_pong, local_tile, CONSUMER)
    k_block = local_tile * num_k
    for k in range(num_k):
        stage = k_block % STAGES
        mbarrier.wait(full.index(stage), k_block // STAGES & 1)
        w = w_bufs.index(stage)
        for part in gl.static_range(2):  # low, high
            grad, adds = grad_bufs.index(2 * stage + part), part + k > 0
            upper = warpgroup_mma(grad.slice(0, HALF_M), w, upper, use_acc=adds, is_async=True)
            lower = warpgroup_mma(grad.slice(HALF_M, HALF_M), w, lower, use_acc=adds, is_async=True)
        # Wait for the MMAs of the previous iteration, so that its stage can be released.
        upper, lower = warpgroup_mma_wait(4, deps=[upper, lower])
        mbarrier.arrive(empty.index((k_block + STAGES - 1) % STAGES), pred=k > 0)
        k_block += 1
    mbarrier.arrive(ping_pong.index(1 - CONSUMER))
    upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
    mbarrier.arrive(empty.index((k_block + STAGES - 1) % STAGES))
    return upper, lower


@gluon.jit
def _scales_of(row, scale_args, HAS_SCALE: gl.constexpr):
    """Return what `own_scales` does for the 64 tokens from `row` on; anything without scales."""
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, acc_layout(PANEL)))
    if HAS_SCALE:
        return own_scales(scale_args, rows)
    else:
        return rows, rows < 0


@gluon.jit
def _load_scale(scales, scale_args, column, HAS_SCALE: gl.constexpr):
    """Begin to load the scales of 64 tokens at the 64 features from `column` on."""
    clusters, has_scale = scales
    scale_ptr, D = scale_args[0], scale_args[4]
    if HAS_SCALE:
        # A panel lies inside D or behind it, D % 64 = 0; what lies behind is not stored.
        start = gl.minimum(column, D - PANEL)
        d = start + gl.arange(0, PANEL, gl.SliceLayout(0, acc_layout(PANEL)))
        at = (clusters * D)[:, None] + d[None, :]
        return gl.load(scale_ptr + at, mask=has_scale[:, None], other=1.0)
    else:
        return clusters


@gluon.jit
def _finish(
    acc, scale, panel_args, panel, row, column, HAS_SCALE: gl.constexpr, HAS_ADDEND: gl.constexpr
):
    """Multiply a panel by its scales, add the addend, and begin to store it."""
    out_desc, panel_bufs, full, phase = panel_args
    buf = panel_bufs.index(panel)
    if HAS_SCALE:
        acc *= scale
    if HAS_ADDEND:
        mbarrier.wait(full.index(panel), phase)
        acc += buf.load(acc_layout(PANEL)).to(gl.float32)
    buf.store(acc.to(buf.dtype))
    fence_async_shared()
    store_tile(out_desc, [row, column], buf)


@gluon.jit
def _consumer(
    CONSUMER: gl.constexpr, consumer_args, HAS_SCALE: gl.constexpr, HAS_ADDEND: gl.constexpr
):
    """Ping-pong consumer: every second tile of the program."""
    pipeline, store_args, panel_empty, scale_args, num_tiles, num_n, num_k = consumer_args
    out_desc, panel_bufs, panel_full = store_args
    programs = gl.num_programs(0)
    local_tile = CONSUMER
    at = CONSUMER * PANELS  # first of the consumer's buffers
    for tile in range(gl.program_id(0) + CONSUMER * programs, num_tiles, 2 * programs):
        row, column = tile // num_n * TILE, tile % num_n * TILE
        lower_row, right_column = row + HALF_M, column + PANEL
        panels = (out_desc, panel_bufs, panel_full, local_tile // 2 & 1)
        # Loaded before the GEMM, which hides the latency.
        scales = _scales_of(row, scale_args, HAS_SCALE)
        lower_scales = _scales_of(lower_row, scale_args, HAS_SCALE)
        scale = _load_scale(scales, scale_args, column, HAS_SCALE)
        upper, lower = _multiply(pipeline, local_tile, num_k, CONSUMER)
        left, right = split_panels(upper)
        next_scale = _load_scale(scales, scale_args, right_column, HAS_SCALE)
        _finish(left, scale, panels, at, row, column, HAS_SCALE, HAS_ADDEND)
        scale = _load_scale(lower_scales, scale_args, column, HAS_SCALE)
        _finish(right, next_scale, panels, at + 1, row, right_column, HAS_SCALE, HAS_ADDEND)
        left, right = split_panels(lower)
        next_scale = _load_scale(lower_scales, scale_args, right_column, HAS_SCALE)
        _finish(left, scale, panels, at + 2, lower_row, column, HAS_SCALE, HAS_ADDEND)
        _finish(right, next_scale, panels, at + 3, lower_row, right_column, HAS_SCALE, HAS_ADDEND)
        tma.store_wait(0)  # the stores have read the buffers
        thread_barrier()
        if HAS_ADDEND:
            for panel in gl.static_range(PANELS):
                mbarrier.arrive(panel_empty.index(at + panel))
        local_tile += 2


@gluon.jit(do_not_specialize=["T", "C", "num_tiles", "num_n", "num_k"])
def token_gradient_kernel(
    grad_desc,
    embedding_desc,
    addend_desc,
    out_desc,
    scale_ptr,
    cluster_ptr,
    T,
    D,
    C,
    num_tiles,
    num_n,
    num_k,
    HAS_SCALE: gl.constexpr,
    HAS_ADDEND: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute d x (T, D) from d affinity, as (2 T, E), and the embedding (E, D); D % 64 = 0."""
    grad_bufs = make_buffers(2 * STAGES, grad_desc)
    w_bufs = make_buffers(STAGES, embedding_desc)
    panel_bufs = make_buffers(2 * PANELS, out_desc)
    full, empty = make_barriers(STAGES, 1, 1)
    panel_full, panel_empty = make_barriers(2 * PANELS, 1, 1)
    ping_pong, _ = make_barriers(2, 1, 1)
    pipeline = (grad_bufs, w_bufs, full, empty, ping_pong)
    scale_args = (scale_ptr, cluster_ptr, T, C, D)
    store_args = (out_desc, panel_bufs, panel_full)
    consumer_args = (pipeline, store_args, panel_empty, scale_args, num_tiles, num_n, num_k)
    load_args = (grad_desc, embedding_desc, pipeline, T, num_tiles, num_n, num_k)
    addend_args = (addend_desc, panel_bufs, panel_full, panel_empty, num_tiles, num_n)
    if HAS_ADDEND:
        gl.warp_specialize(
            [
                (_consumer, (0, consumer_args, HAS_SCALE, HAS_ADDEND)),
                (_consumer, (1, consumer_args, HAS_SCALE, HAS_ADDEND)),
                (_load_blocks, (load_args,)),
                (_load_addends, (addend_args,)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, consumer_args, HAS_SCALE, HAS_ADDEND)),
                (_consumer, (1, consumer_args, HAS_SCALE, HAS_ADDEND)),
                (_load_blocks, (load_args,)),
            ],
            [4, 1],
            [240, 24],
        )
