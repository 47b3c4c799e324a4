"""Grouped GEMM with a multistage TMA pipeline: y (N, O) = a @ w[e]^T, or a @ w[e].

Used for the down projection and the gradient by x ("input"). Producer and consumer warps are those
of pipeline.py, in one of two schedules:
    ping-pong     each consumer computes a (128, 128) tile of its own; the stores of one overlap the
                  MMAs of the other
    cooperative   each consumer computes 64 rows of a (128, 256) tile, which loads fewer bytes for
                  each multiply-add; programs take their tiles in dynamic order (next_tile.py),
                  because a tile with few rows takes less time

Which is faster, or Triton's own pipeline, depends on the shape (settings/tuned.json). This kernel
against Triton's on an H200: 1.26 against 1.41 ms (down, qwen30b, ping-pong), 1.50 against 1.57
(down, olmoe, cooperative), 6.48 against 6.24 (input, mixtral, cooperative).
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

from acmoe.ops.device.gluon_blocks import HALF_M, acc_layout, make_barriers, make_buffers
from acmoe.ops.device.gluon_names import store_tile, thread_barrier
from acmoe.ops.experts.hopper.next_tile import (
    dispatch_tiles,
    make_mailbox,
    next_tile,
    want_tile,
)
from acmoe.ops.experts.hopper.pipeline import (
    load_blocks,
    load_next_blocks,
    mma_tile,
    place_of_tile,
    skip_blocks,
    store_masked,
    tile_of_rows,
)


@gluon.jit
def _store_half(value, buf, y_desc, y_ptr, row, end, column, O):
    """Store (64, columns) as y[row:row + 64, column:], through the buffer `buf`."""
    tma.store_wait(0)  # the previous store has read the buffer
    thread_barrier()
    buf.store(value)
    fence_async_shared()
    if row + HALF_M <= end:
        store_tile(y_desc, [row, column], buf)
    else:
        store_masked(buf, y_ptr, row, end, column, O)


@gluon.jit
def _ping_pong_consumer(
    CONSUMER: gl.constexpr, consumer_args, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr,
    WEIGHT_IO: gl.constexpr,
):  # fmt: skip
    """Ping-pong consumer: compute and store every second tile of the program."""
    y_desc, y_ptr, y_bufs, pipeline, plan, num_k, num_n, O = consumer_args
    BN: gl.constexpr = y_bufs.shape[2]
    num_used = gl.load(plan[3])
    programs = gl.num_programs(0)
    local_tile = CONSUMER
    buf = y_bufs.index(CONSUMER)
    for tile_id in range(gl.program_id(0) + CONSUMER * programs, num_used * num_n, 2 * programs):
        _expert, row, end, n_tile = tile_of_rows(tile_id, plan, num_used, num_n, GROUP_M, BY_EXPERT)
        column = gl.minimum(n_tile * BN, O - BN)
        upper, lower = mma_tile(pipeline, local_tile, end - row, num_k, CONSUMER, WEIGHT_IO)
        _store_half(upper.to(buf.dtype), buf, y_desc, y_ptr, row, end, column, O)
        _store_half(lower.to(buf.dtype), buf, y_desc, y_ptr, row + HALF_M, end, column, O)
        local_tile += 2
    tma.store_wait(0)


@gluon.jit
def _store_kept(kept, store_args):
    """Store the right panel that a consumer kept from an earlier tile, if there is one."""
    panel, row, end, column, exists = kept
    buf, y_desc, y_ptr, O = store_args
    if exists:
        _store_half(panel, buf, y_desc, y_ptr, row, end, column, O)


@gluon.jit
def mma_half(
    pipeline, k_block, num_k, half, kept, store_args, WEIGHT_IO: gl.constexpr
):  # fmt: skip
    """Issue the MMAs of half a tile, and store the kept panel behind the first ones, if not None.

    Return the accumulator; the MMAs of its last block may still run (`finish_half`). The first K
    block is number k_block of the pipeline.
    """
    a_bufs, w_bufs, full, empty, _ = pipeline
    STAGES: gl.constexpr = a_bufs.shape[0]
    BN: gl.constexpr = w_bufs.shape[2] if WEIGHT_IO else w_bufs.shape[1]
    acc = gl.zeros([HALF_M, BN], gl.float32, acc_layout(BN))
    for k in range(num_k):
        stage = k_block % STAGES
        mbarrier.wait(full.index(stage), k_block // STAGES & 1)
        a = a_bufs.index(stage).slice(half * HALF_M, HALF_M)
        w = w_bufs.index(stage)
        if not WEIGHT_IO:
            w = w.permute((1, 0))
        acc = warpgroup_mma(a, w, acc, use_acc=k > 0, is_async=True)
        if kept is not None:
            if k == 0:
                _store_kept(kept, store_args)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((k_block + STAGES - 1) % STAGES), pred=k > 0)
        k_block += 1
    return acc


@gluon.jit
def finish_half(pipeline, k_end, acc):
    """Wait for the MMAs of a tile's last block, number k_end - 1, and release its stage.

    Return the left and the right panel of the accumulator.
    """
    empty = pipeline[3]
    STAGES: gl.constexpr = empty.shape[0]
    HALF_N: gl.constexpr = acc.shape[1] // 2
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((k_end + STAGES - 1) % STAGES))
    left, right = gl.split(acc.reshape(HALF_M, 2, HALF_N).permute(0, 2, 1))
    left = gl.convert_layout(left, acc_layout(HALF_N), assert_trivial=True)
    return left, gl.convert_layout(right, acc_layout(HALF_N), assert_trivial=True)


@gluon.jit
def _cooperative_consumer(
    CONSUMER: gl.constexpr, consumer_args, mailbox, GROUP_M: gl.constexpr,
    BY_EXPERT: gl.constexpr, WEIGHT_IO: gl.constexpr,
):  # fmt: skip
    """Cooperative consumer: compute and store the upper or lower half of every tile.

    It stores the left panel at the end of a tile, and keeps the right one until the first MMAs of
    its next tile run: by then TMA has read the left one from the buffer.
    """
    y_desc, y_ptr, y_bufs, pipeline, plan, num_k, num_n, O = consumer_args
    HALF_N: gl.constexpr = y_bufs.shape[2]
    num_tiles = gl.load(plan[3]) * num_n
    buf = y_bufs.index(CONSUMER)
    store_args = (buf, y_desc, y_ptr, O)
    tile_id, local_tile, k_block = gl.program_id(0), 0, 0
    kept = gl.zeros([HALF_M, HALF_N], y_desc.dtype, acc_layout(HALF_N))
    kept_row, kept_end, kept_column, exists = 0, 0, 0, False
    row, end, n_tile = place_of_tile(tile_id, plan, num_n, GROUP_M, BY_EXPERT)
    while tile_id < num_tiles:
        want_tile(mailbox)
        row += CONSUMER * HALF_M
        if row < end:
            kept_panel = (kept, kept_row, kept_end, kept_column, exists)
            acc = mma_half(pipeline, k_block, num_k, CONSUMER, kept_panel, store_args, WEIGHT_IO)
            column = gl.minimum(n_tile * 2 * HALF_N, O - 2 * HALF_N)
            kept_row, kept_end, kept_column, exists = row, end, column + HALF_N, True
            tile_id = next_tile(mailbox, local_tile)
            row, end, n_tile = place_of_tile(tile_id, plan, num_n, GROUP_M, BY_EXPERT)
            left, right = finish_half(pipeline, k_block + num_k, acc)
            left = left.to(y_desc.dtype)
            _store_half(left, buf, y_desc, y_ptr, kept_row, kept_end, column, O)
            kept = right.to(y_desc.dtype)
        else:
            skip_blocks(pipeline, k_block, num_k)
            tile_id = next_tile(mailbox, local_tile)
            row, end, n_tile = place_of_tile(tile_id, plan, num_n, GROUP_M, BY_EXPERT)
        k_block += num_k
        local_tile += 1
    _store_kept((kept, kept_row, kept_end, kept_column, exists), store_args)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_k", "num_n", "asks_at"])
def rows_gemm_kernel(
    a_desc,
    w_desc,
    y_desc,
    y_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    offsets_ptr,
    num_used_ptr,
    counter_ptr,
    num_k,
    num_n,
    asks_at,
    w_rows,
    O,
    GROUP_M: gl.constexpr,
    BY_EXPERT: gl.constexpr,
    WEIGHT_IO: gl.constexpr,
    STAGES: gl.constexpr,
    COOPERATIVE: gl.constexpr,
):
    """Compute `grouped_gemm_kernel` without bias, for a (N, I) that holds rows.

    num_k, num_n: blocks of I and of O. w_rows: second dimension of w. Where O is no multiple of BN,
    the last tile begins at O - BN; the columns that two tiles share are stored twice, with equal
    values.
    counter, asks_at: as in up.py if COOPERATIVE, else None.
    """
    a_bufs = make_buffers(STAGES, a_desc)
    w_bufs = make_buffers(STAGES, w_desc)
    y_bufs = make_buffers(2, y_desc)
    full, empty = make_barriers(STAGES, 1, 2 if COOPERATIVE else 1)
    ping_pong, _ = make_barriers(2, 1, 1)  # for COOPERATIVE unused
    pipeline = (a_bufs, w_bufs, full, empty, ping_pong)
    plan = (tile_expert_ptr, tile_start_ptr, offsets_ptr, num_used_ptr)
    consumer_args = (y_desc, y_ptr, y_bufs, pipeline, plan, num_k, num_n, O)
    BN: gl.constexpr = w_desc.block_shape[1] if WEIGHT_IO else w_desc.block_shape[0]
    load_args = (a_desc, w_desc, pipeline, plan, num_k, num_n, w_rows, O - BN)
    if COOPERATIVE:
        mailbox = make_mailbox(3)
        gl.warp_specialize(
            [
                (
                    _cooperative_consumer,
                    (0, consumer_args, mailbox, GROUP_M, BY_EXPERT, WEIGHT_IO),
                ),
                (
                    _cooperative_consumer,
                    (1, consumer_args, mailbox, GROUP_M, BY_EXPERT, WEIGHT_IO),
                ),
                (load_next_blocks, (load_args, mailbox, asks_at, GROUP_M, BY_EXPERT, WEIGHT_IO)),
                (dispatch_tiles, (mailbox, num_used_ptr, num_n, counter_ptr)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_ping_pong_consumer, (0, consumer_args, GROUP_M, BY_EXPERT, WEIGHT_IO)),
                (_ping_pong_consumer, (1, consumer_args, GROUP_M, BY_EXPERT, WEIGHT_IO)),
                (load_blocks, (load_args, GROUP_M, BY_EXPERT, WEIGHT_IO)),
            ],
            [4, 1],
            [240, 24],
        )
