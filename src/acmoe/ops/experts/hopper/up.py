"""Grouped GEMM of the up projection with SwiGLU in its epilogue, for experts of a few hundred rows.

    a (N, F) = silu(x[token] @ gate[e]^T) * (x[token] @ up[e]^T)

Persistent and cooperative (pipeline.py): a tile is 128 rows and 128 hidden units of one expert, and
each of two consumers owns 64 rows of it. An expert with about 128 rows often has a second tile with
a few rows. There the second consumer has nothing to do, so that rows are padded to multiples of 64,
while both tiles have the weights' traffic of 128. Two warps gather tokens by cp.async, one loads
the weights of gate and up by TMA, and one gives out the tiles, in dynamic order (next_tile.py),
because a tile with a few rows takes less time. h is not stored: this is the forward without a
backward.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from acmoe.ops.device.gluon_blocks import HALF_M, acc_layout, make_barriers, make_buffers
from acmoe.ops.device.gluon_names import load_rows, load_tile
from acmoe.ops.experts.hopper.next_tile import (
    dispatch_tiles,
    make_mailbox,
    next_tile,
    want_tile,
)
from acmoe.ops.experts.hopper.pipeline import skip_blocks, tile_of_rows, token_pointers
from acmoe.ops.experts.triton.activation import silu

_GATHER_WARPS = gl.constexpr(2)
_BK = gl.constexpr(64)
COLUMNS = gl.constexpr(128)  # hidden units of a tile
_RESULT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def _tile_at(tile_id, plan, num_used, num_n, F, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr):
    """Return a tile's expert, first row, end of the expert's rows, and first hidden unit.

    Where F is no multiple of 128 the last tile begins earlier, and ends at the edge.
    """
    expert, row, end, n_tile = tile_of_rows(tile_id, plan, num_used, num_n, GROUP_M, BY_EXPERT)
    return expert, row, end, gl.minimum(n_tile * COLUMNS, F - COLUMNS)


@gluon.jit
def _load_weights(load_args, asks_at, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr):
    """Producer: load the blocks of gate and up of all tiles of the program by TMA.

    The program takes its next tile after block asks_at of the last one.
    """
    w_desc, pipeline, mailbox, plan, num_n, num_k, F = load_args[2:]
    w_bufs, full, empty = pipeline[1], pipeline[2], pipeline[3]
    STAGES: gl.constexpr = full.shape[0]
    num_used = gl.load(plan[3])
    tile_id, local_tile, k_block = gl.program_id(0), 0, 0
    while tile_id < num_used * num_n:
        expert, _row, _end, column = _tile_at(tile_id, plan, num_used, num_n, F, GROUP_M, BY_EXPERT)
        gate_row = 2 * expert * F + column
        for k in range(num_k):
            stage = k_block % STAGES
            full_bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
            mbarrier.expect(full_bar, 2 * w_desc.block_type.nbytes)
            load_tile(w_desc, [gate_row, k * _BK], full_bar, w_bufs.index(2 * stage))
            load_tile(w_desc, [gate_row + F, k * _BK], full_bar, w_bufs.index(2 * stage + 1))
            want_tile(mailbox, k == asks_at)
            k_block += 1
        tile_id = next_tile(mailbox, local_tile)
        local_tile += 1


@gluon.jit
def _gather_tokens(load_args, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr):
    """Producer: copy the tokens of all tiles of the program to shared memory, by 16 bytes."""
    x_ptr, token_ptr = load_args[0], load_args[1]
    pipeline, mailbox, plan, num_n, num_k, F = load_args[3:]
    x_bufs, full, empty = pipeline[0], pipeline[2], pipeline[3]
    STAGES: gl.constexpr = full.shape[0]
    num_used = gl.load(plan[3])
    tile_id, local_tile, k_block = gl.program_id(0), 0, 0
    while tile_id < num_used * num_n:
        want_tile(mailbox)
        _expert, row, end, _column = _tile_at(tile_id, plan, num_used, num_n, F, GROUP_M, BY_EXPERT)
        D, below = num_k * _BK, row + HALF_M
        upper, has_upper = token_pointers(x_ptr, token_ptr, row, end, D, HALF_M)
        lower, has_lower = token_pointers(x_ptr, token_ptr, below, end, D, HALF_M)
        for k in range(num_k):
            stage = k_block % STAGES
            mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
            load_rows(x_bufs.index(2 * stage), upper + k * _BK, mask=has_upper)
            if below < end:
                load_rows(x_bufs.index(2 * stage + 1), lower + k * _BK, mask=has_lower)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            k_block += 1
        tile_id = next_tile(mailbox, local_tile)
        local_tile += 1


@gluon.jit
def _mma_half(pipeline, k_block, num_k, CONSUMER: gl.constexpr):
    """Issue the MMAs of gate and up (64, 128) of half a tile; return both accumulators.

    The MMAs of the last block may still run (`_finish_half`). k_block: number of the first block.
    """
    x_bufs, w_bufs, full, empty = pipeline
    STAGES: gl.constexpr = full.shape[0]
    gate = gl.zeros([HALF_M, COLUMNS], gl.float32, acc_layout(COLUMNS))
    up = gl.zeros([HALF_M, COLUMNS], gl.float32, acc_layout(COLUMNS))
    for k in range(num_k):
        stage = k_block % STAGES
        mbarrier.wait(full.index(stage), k_block // STAGES & 1)
        fence_async_shared()  # cp.async wrote the tokens
        x = x_bufs.index(2 * stage + CONSUMER)
        w_gate = w_bufs.index(2 * stage).permute((1, 0))
        w_up = w_bufs.index(2 * stage + 1).permute((1, 0))
        gate = warpgroup_mma(x, w_gate, gate, use_acc=k > 0, is_async=True)
        up = warpgroup_mma(x, w_up, up, use_acc=k > 0, is_async=True)
        # Wait for the MMAs of the previous iteration, so that its stage can be released.
        gate, up = warpgroup_mma_wait(2, deps=[gate, up])
        mbarrier.arrive(empty.index((k_block + STAGES - 1) % STAGES), pred=k > 0)
        k_block += 1
    return gate, up


@gluon.jit
def _finish_half(pipeline, k_end, gate, up):
    """Wait for the MMAs of a tile's last block, number k_end - 1, and release its stage."""
    empty = pipeline[3]
    STAGES: gl.constexpr = empty.shape[0]
    gate, up = warpgroup_mma_wait(0, deps=[gate, up])
    mbarrier.arrive(empty.index((k_end + STAGES - 1) % STAGES))
    return gate, up


@gluon.jit
def _place(tile_id, plan, num_n, F, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr):
    """Return a tile's first row, end of the expert's rows, and first hidden unit.

    A number past the last tile, which ends the program, gives the place of some other tile.
    """
    num_used = gl.maximum(gl.load(plan[3]), 1)
    some = gl.minimum(tile_id, num_used * num_n - 1)
    _expert, row, end, column = _tile_at(some, plan, num_used, num_n, F, GROUP_M, BY_EXPERT)
    return row, end, column


@gluon.jit
def _consumer(
    CONSUMER: gl.constexpr, consumer_args, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr
):
    """Cooperative consumer: the upper or lower 64 rows of every tile.

    It looks up its next tile while the last MMAs of a tile run.
    """
    a_ptr, pipeline, mailbox, plan, num_n, num_k, F = consumer_args
    num_tiles = gl.load(plan[3]) * num_n
    tile_id, local_tile, k_block = gl.program_id(0), 0, 0
    next_row, next_end, next_column = _place(tile_id, plan, num_n, F, GROUP_M, BY_EXPERT)
    while tile_id < num_tiles:
        want_tile(mailbox)
        row, end, column = next_row + CONSUMER * HALF_M, next_end, next_column
        if row < end:
            gate, up = _mma_half(pipeline, k_block, num_k, CONSUMER)
            tile_id = next_tile(mailbox, local_tile)
            next_row, next_end, next_column = _place(tile_id, plan, num_n, F, GROUP_M, BY_EXPERT)
            gate, up = _finish_half(pipeline, k_block + num_k, gate, up)
            # Rounded as where h is stored.
            gate = gate.to(a_ptr.dtype.element_ty).to(gl.float32)
            up = up.to(a_ptr.dtype.element_ty).to(gl.float32)
            value = gl.convert_layout((silu(gate) * up).to(a_ptr.dtype.element_ty), _RESULT)
            rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, _RESULT))
            cols = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, _RESULT))
            at = rows.to(gl.int64)[:, None] * F + cols[None, :]
            gl.store(a_ptr + at, value, mask=(rows < end)[:, None])
        else:
            skip_blocks(pipeline, k_block, num_k)
            tile_id = next_tile(mailbox, local_tile)
            next_row, next_end, next_column = _place(tile_id, plan, num_n, F, GROUP_M, BY_EXPERT)
        k_block += num_k
        local_tile += 1


@gluon.jit(do_not_specialize=["num_n", "num_k", "asks_at"])
def up_swiglu_kernel(
    x_ptr,
    token_ptr,
    w_desc,
    a_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    offsets_ptr,
    num_used_ptr,
    counter_ptr,
    num_n,
    num_k,
    asks_at,
    F,
    GROUP_M: gl.constexpr,
    BY_EXPERT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute a (N, F) of tokens x (T, 64 num_k), which are gathered, and up (E * 2 F, D).

    counter: one int32 of this launch alone, zero before and after it. asks_at: the block of a tile
    after which the program takes its next one.
    """
    x_bufs = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, HALF_M, _BK], w_desc.layout)
    w_bufs = make_buffers(2 * STAGES, w_desc)
    full, empty = make_barriers(STAGES, 1 + 32 * _GATHER_WARPS, 2)
    pipeline = (x_bufs, w_bufs, full, empty)
    mailbox = make_mailbox(4)
    plan = (tile_expert_ptr, tile_start_ptr, offsets_ptr, num_used_ptr)
    consumer_args = (a_ptr, pipeline, mailbox, plan, num_n, num_k, F)
    load_args = (x_ptr, token_ptr, w_desc, pipeline, mailbox, plan, num_n, num_k, F)
    gl.warp_specialize(
        [
            (_consumer, (0, consumer_args, GROUP_M, BY_EXPERT)),
            (_consumer, (1, consumer_args, GROUP_M, BY_EXPERT)),
            (_gather_tokens, (load_args, GROUP_M, BY_EXPERT)),
            (_load_weights, (load_args, asks_at, GROUP_M, BY_EXPERT)),
            (dispatch_tiles, (mailbox, num_used_ptr, num_n, counter_ptr)),
        ],
        [4, _GATHER_WARPS, 1, 1],
        [208, 88, 88, 88],
    )
