"""Building blocks of the warp-specialised persistent grouped GEMMs for Hopper, in Gluon.

They compute (128, BN) tiles of y = a @ w[e]^T, or a @ w[e], for rows a (N, I) sorted by expert. One
program runs on each multiprocessor and iterates over every num_programs-th tile, or takes them from
a counter (next_tile.py). Its warps have different roles:
    producer       one warp loads blocks of a and w by TMA into a multistage pipeline in shared
                   memory, tile after tile; each stage has a "full" and an "empty" mbarrier
    two consumers  warpgroups of four warps multiply by wgmma and run the epilogue, either
                   ping-pong: they alternate tiles, so that one runs the epilogue while the other
                   multiplies and the tensor cores do not wait for an epilogue, which the pipelines
                   that Triton's compiler makes (triton/forward.py) cannot do; or
                   cooperative: each computes half of every tile

A tile consists of two halves of 64 rows, the M of one wgmma. The epilogue stores a half by TMA in
panels of 64 columns or more; a half in which an expert's rows end is stored with masks instead,
because the next expert's rows follow.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from acmoe.ops.device.gluon_blocks import HALF_M, acc_layout, wait_ping_pong
from acmoe.ops.device.gluon_names import load_tile
from acmoe.ops.experts.hopper.next_tile import next_tile, want_tile
from acmoe.ops.experts.triton.tiles import row_tile

_CONSUMER_WARPS = gl.constexpr(4)
_GATHERED = gl.constexpr(64)  # features of a block of tokens
_TOKENS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))


@gluon.jit
def tile_of_rows(tile_id, plan, num_used, num_n, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr):
    """Return a tile's expert, first row, end of the expert's rows, and column tile."""
    tile_expert_ptr, tile_start_ptr, offsets_ptr, _ = plan
    return row_tile(
        *(tile_id, tile_expert_ptr, tile_start_ptr, offsets_ptr, num_used, num_n),
        *(GROUP_M, BY_EXPERT, 2 * HALF_M),
    )


@gluon.jit
def place_of_tile(tile_id, plan, num_n, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr):
    """Return a tile's first row, end of the expert's rows, and column tile.

    A number past the last tile, which ends the program, gives the place of some other tile.
    """
    num_used = gl.maximum(gl.load(plan[3]), 1)
    some = gl.minimum(tile_id, num_used * num_n - 1)
    _expert, row, end, n_tile = tile_of_rows(some, plan, num_used, num_n, GROUP_M, BY_EXPERT)
    return row, end, n_tile


@gluon.jit
def _load_tile_blocks(
    load_args, tile_id, num_used, k_block, mailbox, asks_at, GROUP_M: gl.constexpr,
    BY_EXPERT: gl.constexpr, WEIGHT_IO: gl.constexpr,
):  # fmt: skip
    """Load the blocks of a and w of a tile; return the number of the next tile's first block.

    mailbox: ask for the next tile after block asks_at of this one; None: do not.
    """
    a_desc, w_desc, pipeline, plan, num_k, num_n, w_rows, last_column = load_args
    a_bufs, w_bufs, full, empty, _ = pipeline
    STAGES: gl.constexpr = a_bufs.shape[0]
    BK: gl.constexpr = a_bufs.shape[2]
    BN: gl.constexpr = w_bufs.shape[2] if WEIGHT_IO else w_bufs.shape[1]
    expert, row, _end, n_tile = tile_of_rows(tile_id, plan, num_used, num_n, GROUP_M, BY_EXPERT)
    w_row = expert * w_rows
    column = gl.minimum(n_tile * BN, last_column)
    for k in range(num_k):
        stage = k_block % STAGES
        full_bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
        mbarrier.expect(full_bar, a_desc.block_type.nbytes + w_desc.block_type.nbytes)
        load_tile(a_desc, [row, k * BK], full_bar, a_bufs.index(stage))
        if WEIGHT_IO:
            coord = [w_row + k * BK, column]
        else:
            coord = [w_row + column, k * BK]
        load_tile(w_desc, coord, full_bar, w_bufs.index(stage))
        if mailbox is not None:
            want_tile(mailbox, k == asks_at)
        k_block += 1
    return k_block


@gluon.jit
def token_pointers(x_ptr, token_ptr, row, end, D, ROWS: gl.constexpr):
    """Return pointers to 64 features of ROWS tokens from `row` on, and if they exist."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, _TOKENS))
    cols = gl.arange(0, _GATHERED, gl.SliceLayout(0, _TOKENS))
    token = gl.load(token_ptr + rows, mask=rows < end, other=0)
    return x_ptr + token.to(gl.int64)[:, None] * D + cols[None, :], (rows < end)[:, None]


@gluon.jit
def load_blocks(load_args, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr, WEIGHT_IO: gl.constexpr):
    """Producer: load the blocks of a and w of every num_programs-th tile into the pipeline.

    w is (E, O, I), or (E, I, O) if WEIGHT_IO; w_rows is its second dimension. No tile begins after
    last_column.
    """
    num_n = load_args[5]
    num_used = gl.load(load_args[3][3])
    k_block = 0
    for tile_id in range(gl.program_id(0), num_used * num_n, gl.num_programs(0)):
        k_block = _load_tile_blocks(
            load_args, tile_id, num_used, k_block, None, None, GROUP_M, BY_EXPERT, WEIGHT_IO
        )


@gluon.jit
def load_next_blocks(
    load_args, mailbox, asks_at, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr,
    WEIGHT_IO: gl.constexpr,
):  # fmt: skip
    """Producer: as `load_blocks`, for the tiles that the program takes from the counter.

    It takes its next tile after block asks_at of the last one.
    """
    num_n = load_args[5]
    num_used = gl.load(load_args[3][3])
    tile_id, local_tile, k_block = gl.program_id(0), 0, 0
    while tile_id < num_used * num_n:
        k_block = _load_tile_blocks(
            load_args, tile_id, num_used, k_block, mailbox, asks_at, GROUP_M, BY_EXPERT, WEIGHT_IO
        )
        tile_id = next_tile(mailbox, local_tile)
        local_tile += 1


@gluon.jit
def _mma_loop(
    pipeline, upper, lower, k_block, num_k, CONSUMER: gl.constexpr, WEIGHT_IO: gl.constexpr,
    NUM_HALVES: gl.constexpr,
):  # fmt: skip
    """Multiply a tile whose first K block is number k_block of the pipeline; return both halves.

    The lower half is computed only if NUM_HALVES is 2.
    """
    a_bufs, w_bufs, full, empty, ping_pong = pipeline
    STAGES: gl.constexpr = a_bufs.shape[0]
    for k in range(num_k):
        stage = k_block % STAGES
        mbarrier.wait(full.index(stage), k_block // STAGES & 1)
        a = a_bufs.index(stage)
        w = w_bufs.index(stage)
        if not WEIGHT_IO:
            w = w.permute((1, 0))
        upper = warpgroup_mma(a.slice(0, HALF_M), w, upper, use_acc=k > 0, is_async=True)
        # Wait for the MMAs of the previous iteration, so that its stage can be released.
        if NUM_HALVES == 2:
            lower = warpgroup_mma(a.slice(HALF_M, HALF_M), w, lower, use_acc=k > 0, is_async=True)
            upper, lower = warpgroup_mma_wait(2, deps=[upper, lower])
        else:
            upper = warpgroup_mma_wait(1, deps=[upper])
        mbarrier.arrive(empty.index((k_block + STAGES - 1) % STAGES), pred=k > 0)
        k_block += 1
    mbarrier.arrive(ping_pong.index(1 - CONSUMER))
    if NUM_HALVES == 2:
        upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
    else:
        upper = warpgroup_mma_wait(0, deps=[upper])
    mbarrier.arrive(empty.index((k_block + STAGES - 1) % STAGES))
    return upper, lower


@gluon.jit
def mma_tile(pipeline, local_tile, rows, num_k, CONSUMER: gl.constexpr, WEIGHT_IO: gl.constexpr):
    """Return both accumulators (64, BN) of the program's local_tile-th tile, of `rows` rows."""
    w_bufs = pipeline[1]
    BN: gl.constexpr = w_bufs.shape[2] if WEIGHT_IO else w_bufs.shape[1]
    upper = gl.zeros([HALF_M, BN], gl.float32, acc_layout(BN))
    lower = gl.zeros([HALF_M, BN], gl.float32, acc_layout(BN))
    wait_ping_pong(pipeline[4], local_tile, CONSUMER)
    k_block = local_tile * num_k
    if rows > HALF_M:
        upper, lower = _mma_loop(pipeline, upper, lower, k_block, num_k, CONSUMER, WEIGHT_IO, 2)
    else:
        upper, lower = _mma_loop(pipeline, upper, lower, k_block, num_k, CONSUMER, WEIGHT_IO, 1)
    return upper, lower


@gluon.jit
def skip_blocks(pipeline, k_block, num_k):
    """Cooperative consumer whose half of a tile has no rows: release the tile's stages unread."""
    full, empty = pipeline[2], pipeline[3]
    STAGES: gl.constexpr = full.shape[0]
    for k in range(num_k):
        stage, phase = (k_block + k) % STAGES, (k_block + k) // STAGES & 1
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage))


@gluon.jit
def store_masked(buf, ptr, row, end, column, stride):
    """Store the rows before `end` of half a tile from shared memory, through registers."""
    BN: gl.constexpr = buf.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // BN, BN // 8], [_CONSUMER_WARPS, 1], [1, 0]
    )
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, layout))
    cols = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
    ptrs = ptr + rows[:, None].to(gl.int64) * stride + cols[None, :]
    gl.store(ptrs, buf.load(layout), mask=(rows < end)[:, None])
