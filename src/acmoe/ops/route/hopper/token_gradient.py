"""Gradient of the router's tokens on Hopper, for many experts.

    d x (T, D) = (d affinity @ embedding) * scale of the token's cluster + addend

d affinity (2, T, E) is a bf16x2 split, whose parts are two halves of one inner dimension: the low
parts come first. The result is rounded to bf16, so that the tensor cores may add up everything.
Persistent ping-pong kernel (ops/experts/hopper/pipeline.py) over tiles of 128 tokens and 128
features: while one consumer loads scales and addends and stores its result, the other multiplies.

T tokens, D features, E experts, C clusters.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from acmoe.ops.device.gluon_names import load_tile
from acmoe.ops.experts.hopper.pipeline import (
    HALF_M,
    PANEL,
    make_barriers,
    make_buffers,
    mma_tile,
    split_panels,
)
from acmoe.ops.route.hopper.affinity import ROWS, own_scales

TILE = gl.constexpr(128)  # tokens, and features, of a tile
BLOCK = gl.constexpr(64)  # experts of a block


@gluon.jit
def _load_blocks(load_args):
    """Producer: load the blocks of d affinity and of the embedding of all tiles of the program."""
    grad_desc, embedding_desc, pipeline, T, num_tiles, num_n, num_k = load_args
    grad_bufs, w_bufs, full, empty, _ = pipeline
    STAGES: gl.constexpr = grad_bufs.shape[0]
    num_blocks = num_k // 2
    k_block = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = tile // num_n * TILE, tile % num_n * TILE
        for k in range(num_k):
            stage = k_block % STAGES
            full_bar = full.index(stage)
            # Rows after the last token are those of the other part, or zeros; nobody stores them.
            part_row = gl.where(k < num_blocks, T, 0) + row
            expert = k % num_blocks * BLOCK
            mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
            mbarrier.expect(
                full_bar, grad_desc.block_type.nbytes + embedding_desc.block_type.nbytes
            )
            load_tile(grad_desc, [part_row, expert], full_bar, grad_bufs.index(stage))
            load_tile(embedding_desc, [expert, column], full_bar, w_bufs.index(stage))
            k_block += 1


@gluon.jit
def _scales_of(row, scale_args, HAS_SCALE: gl.constexpr):
    """Return what `own_scales` does for the 64 tokens from `row` on; anything without scales."""
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, ROWS))
    if HAS_SCALE:
        return own_scales(scale_args, rows)
    else:
        return rows, rows < 0


@gluon.jit
def _finish(
    acc, row, column, scales, scale_ptr, out_args, HAS_SCALE: gl.constexpr,
    HAS_ADDEND: gl.constexpr,
):  # fmt: skip
    """Multiply 64 tokens at 128 features by their scales, add the addend, and store them."""
    addend_ptr, out_ptr, T, D = out_args
    clusters, has_scale = scales
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, ROWS))
    panels = split_panels(acc)
    for panel in gl.static_range(2):
        d = column + panel * PANEL + gl.arange(0, PANEL, gl.SliceLayout(0, ROWS))
        at = rows.to(gl.int64)[:, None] * D + d[None, :]
        valid = (rows < T)[:, None] & (d < D)[None, :]
        if HAS_ADDEND:
            addend = gl.load(addend_ptr + at, mask=valid, other=0.0)
        if HAS_SCALE:
            scale = gl.load(
                scale_ptr + (clusters * D)[:, None] + d[None, :],
                mask=has_scale[:, None] & (d < D)[None, :],
                other=1.0,
            )
        grad = gl.convert_layout(panels[panel], ROWS)
        if HAS_SCALE:
            grad *= scale
        if HAS_ADDEND:
            grad += addend.to(gl.float32)
        gl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=valid)


@gluon.jit
def _consumer(
    CONSUMER: gl.constexpr, consumer_args, HAS_SCALE: gl.constexpr, HAS_ADDEND: gl.constexpr
):
    """Ping-pong consumer: every second tile of the program."""
    pipeline, scale_args, out_args, num_tiles, num_n, num_k = consumer_args
    T = out_args[2]
    programs = gl.num_programs(0)
    local_tile = CONSUMER
    for tile in range(gl.program_id(0) + CONSUMER * programs, num_tiles, 2 * programs):
        row, column = tile // num_n * TILE, tile % num_n * TILE
        # Loaded before the GEMM, which hides the latency.
        scales = _scales_of(row, scale_args, HAS_SCALE)
        lower_scales = _scales_of(row + HALF_M, scale_args, HAS_SCALE)
        upper, lower = mma_tile(pipeline, local_tile, T - row, num_k, CONSUMER, True)
        args = (scale_args[0], out_args)
        _finish(upper, row, column, scales, *args, HAS_SCALE, HAS_ADDEND)
        if row + HALF_M < T:
            _finish(lower, row + HALF_M, column, lower_scales, *args, HAS_SCALE, HAS_ADDEND)
        local_tile += 2


@gluon.jit(do_not_specialize=["T", "C", "num_tiles", "num_n", "num_k"])
def token_gradient_kernel(
    grad_desc,
    embedding_desc,
    scale_ptr,
    cluster_ptr,
    addend_ptr,
    out_ptr,
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
    """Compute d x (T, D) from d affinity, as (2 T, E), and the embedding (E, D)."""
    grad_bufs = make_buffers(STAGES, grad_desc)
    w_bufs = make_buffers(STAGES, embedding_desc)
    full, empty = make_barriers(STAGES, 1, 1)
    ping_pong, _ = make_barriers(2, 1, 1)
    pipeline = (grad_bufs, w_bufs, full, empty, ping_pong)
    scale_args = (scale_ptr, cluster_ptr, T, C, D)
    out_args = (addend_ptr, out_ptr, T, D)
    consumer_args = (pipeline, scale_args, out_args, num_tiles, num_n, num_k)
    load_args = (grad_desc, embedding_desc, pipeline, T, num_tiles, num_n, num_k)
    gl.warp_specialize(
        [
            (_consumer, (0, consumer_args, HAS_SCALE, HAS_ADDEND)),
            (_consumer, (1, consumer_args, HAS_SCALE, HAS_ADDEND)),
            (_load_blocks, (load_args,)),
        ],
        [4, 1],
        [240, 24],
    )
