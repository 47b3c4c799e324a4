"""GEMMs for experts of about 128 rows, where an expert's rows are the columns of the MMAs.

    up     a (N, F) = silu(x[token] @ gate[e]^T) * (x[token] @ up[e]^T)
    down   y (N, O) = a @ down[e]^T

With so few rows a GEMM takes as long as its weights take to the multiprocessors, from memory and
through L2. wgmma multiplies 64 rows of its first operand by up to 256 columns of its second. Where
rows of tokens are the first, in tiles of 128 (up.py, rows.py), an expert of 130 rows has a second
tile, which reads all weights again. Here the weights are the first operand: a tile has 256 rows of
weights, 128 each of gate and up or 256 of down, and up to 128 + 32 rows of an expert as columns.

Persistent and cooperative (pipeline.py): each of two consumers has half of the weights' rows, and
holds the transpose of its part of the result. Programs take their tiles in dynamic order
(next_tile.py). Tiles of more rows, up to 256, are computed in two parts. The up projection gathers
its tokens by cp.async and stores no h: it is the forward without a backward.

Times of up and down against the kernels with tokens first, in microseconds (H200, a script that was
not kept): 516 and 262 against 575 and 322 (mixtral@512), 721 and 378 against 817 and 402
(scout@2048), 311 and 166 against 334 and 180 (gptoss@1024), 168 and 95 against 176 and 95
(olmoe@1024). All have 128 rows an expert. With 96 rows they take 2 to 3% longer; with 152, where
some experts have two parts, 7 to 9% longer (olmoe).
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
from acmoe.ops.experts.hopper.pipeline import token_pointers
from acmoe.ops.experts.triton.activation import silu
from acmoe.ops.experts.triton.tiles import row_tile

TILE_ROWS = gl.constexpr(256)  # most rows of an expert in a tile: a height of `Plan`
PART_ROWS = gl.constexpr(128)  # rows of an expert in a part
EXTRA_ROWS = gl.constexpr(32)  # most rows that a part may have beyond PART_ROWS
WEIGHT_ROWS = gl.constexpr(128)  # in each of the two blocks of weights of a tile
_BK = gl.constexpr(64)
_GATHER_WARPS = gl.constexpr(2)
_RESULT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _tile_at(tile_id, plan, num_used, order):
    """Return a tile's expert, first row, end of its rows, and first column of the result.

    order: columns of a tile, tiles of a row, the first column of the last tile, and how tiles are
    grouped (`row_tile`). Columns that the last tile shares with its neighbour are stored twice.
    """
    tile_expert_ptr, tile_start_ptr, offsets_ptr, _ = plan
    step, num_n, last_column, GROUP_M, BY_EXPERT = order
    expert, row, end, n_tile = row_tile(
        *(tile_id, tile_expert_ptr, tile_start_ptr, offsets_ptr, num_used, num_n),
        *(GROUP_M, BY_EXPERT, TILE_ROWS),
    )
    return expert, row, gl.minimum(end, row + TILE_ROWS), gl.minimum(n_tile * step, last_column)


@gluon.jit
def _place(tile_id, plan, order):
    """Return a tile's first row, end of its rows, and first column.

    A number past the last tile, which ends the program, gives the place of some other tile.
    """
    num_used = gl.maximum(gl.load(plan[3]), 1)
    some = gl.minimum(tile_id, num_used * order[1] - 1)
    _expert, row, end, column = _tile_at(some, plan, num_used, order)
    return row, end, column


@gluon.jit
def _part_size(row, end):
    """Return the most rows of each part of a tile: 160, or 128 if its rows need two parts."""
    return gl.where(end - row > PART_ROWS + EXTRA_ROWS, PART_ROWS, PART_ROWS + EXTRA_ROWS)


@gluon.jit
def _load_blocks(load_args, mailbox, asks_at, order):
    """Producer: load both blocks of weights of every step by TMA, and rows unless gathered.

    The second block lies `apart` rows below the first. The program takes its next tile after block
    asks_at of the last part of a tile.
    """
    w_desc, rows_desc, extra_desc, pipeline, plan, num_k, w_rows, apart = load_args
    row_bufs, extra_bufs, w_bufs, full, empty = pipeline
    STAGES: gl.constexpr = full.shape[0]
    WEIGHT_BYTES: gl.constexpr = 2 * w_desc.block_type.nbytes
    num_used = gl.load(plan[3])
    tile_id, local_tile, k_block = gl.program_id(0), 0, 0
    while tile_id < num_used * order[1]:
        expert, row, end, column = _tile_at(tile_id, plan, num_used, order)
        w_row = expert * w_rows + column
        size = _part_size(row, end)
        for first in range(row, end, size):
            has_extra = first + PART_ROWS < gl.minimum(first + size, end)
            for k in range(num_k):
                stage, at = k_block % STAGES, k * _BK
                full_bar = full.index(stage)
                mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
                if rows_desc is not None:
                    PART_BYTES: gl.constexpr = WEIGHT_BYTES + rows_desc.block_type.nbytes
                    ALL_BYTES: gl.constexpr = PART_BYTES + extra_desc.block_type.nbytes
                    mbarrier.expect(full_bar, PART_BYTES, pred=not has_extra)
                    mbarrier.expect(full_bar, ALL_BYTES, pred=has_extra)
                    load_tile(rows_desc, [first, at], full_bar, row_bufs.index(stage))
                    extra_buf = extra_bufs.index(stage)
                    coord = [first + PART_ROWS, at]
                    load_tile(extra_desc, coord, full_bar, extra_buf, pred=has_extra)
                else:
                    mbarrier.expect(full_bar, WEIGHT_BYTES)
                load_tile(w_desc, [w_row, at], full_bar, w_bufs.index(2 * stage))
                load_tile(w_desc, [w_row + apart, at], full_bar, w_bufs.index(2 * stage + 1))
                want_tile(mailbox, (first + size >= end) & (k == asks_at))
                k_block += 1
        tile_id = next_tile(mailbox, local_tile)
        local_tile += 1


@gluon.jit
def _gather_tokens(gather_args, mailbox, order):
    """Producer: copy the tokens of all tiles of the program to shared memory, by 16 bytes."""
    x_ptr, token_ptr, pipeline, plan, num_k = gather_args
    row_bufs, extra_bufs, _, full, empty = pipeline
    STAGES: gl.constexpr = full.shape[0]
    D = num_k * _BK
    num_used = gl.load(plan[3])
    tile_id, local_tile, k_block = gl.program_id(0), 0, 0
    while tile_id < num_used * order[1]:
        want_tile(mailbox)
        _expert, row, end, _column = _tile_at(tile_id, plan, num_used, order)
        size = _part_size(row, end)
        for first in range(row, end, size):
            stop, below = gl.minimum(first + size, end), first + PART_ROWS
            tokens, exist = token_pointers(x_ptr, token_ptr, first, stop, D, PART_ROWS)
            extra, extra_exist = token_pointers(x_ptr, token_ptr, below, stop, D, EXTRA_ROWS)
            for k in range(num_k):
                stage = k_block % STAGES
                mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
                load_rows(row_bufs.index(stage), tokens + k * _BK, mask=exist)
                if below < stop:
                    load_rows(extra_bufs.index(stage), extra + k * _BK, mask=extra_exist)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                k_block += 1
        tile_id = next_tile(mailbox, local_tile)
        local_tile += 1


@gluon.jit
def _mma_part(
    pipeline, k_block, num_k, CONSUMER: gl.constexpr, GATHERED: gl.constexpr,
    HAS_EXTRA: gl.constexpr,
):  # fmt: skip
    """Issue the MMAs of a part; return the products of both blocks of weights with its rows.

    These are two accumulators (64, 128), and two (64, 32) of the extra rows, which stay zeros
    unless HAS_EXTRA. The MMAs of the last block may still run (`_finish_part`). k_block: number of
    the first block.
    """
    row_bufs, extra_bufs, w_bufs, full, empty = pipeline
    STAGES: gl.constexpr = full.shape[0]
    one = gl.zeros([HALF_M, PART_ROWS], gl.float32, acc_layout(PART_ROWS))
    two = gl.zeros([HALF_M, PART_ROWS], gl.float32, acc_layout(PART_ROWS))
    one_extra = gl.zeros([HALF_M, EXTRA_ROWS], gl.float32, acc_layout(EXTRA_ROWS))
    two_extra = gl.zeros([HALF_M, EXTRA_ROWS], gl.float32, acc_layout(EXTRA_ROWS))
    for k in range(num_k):
        stage = k_block % STAGES
        mbarrier.wait(full.index(stage), k_block // STAGES & 1)
        if GATHERED:
            fence_async_shared()  # cp.async wrote the tokens
        rows = row_bufs.index(stage).permute((1, 0))
        w_one = w_bufs.index(2 * stage).slice(CONSUMER * HALF_M, HALF_M)
        w_two = w_bufs.index(2 * stage + 1).slice(CONSUMER * HALF_M, HALF_M)
        one = warpgroup_mma(w_one, rows, one, use_acc=k > 0, is_async=True)
        two = warpgroup_mma(w_two, rows, two, use_acc=k > 0, is_async=True)
        # Wait for the MMAs of the previous iteration, so that its stage can be released.
        if HAS_EXTRA:
            extra = extra_bufs.index(stage).permute((1, 0))
            one_extra = warpgroup_mma(w_one, extra, one_extra, use_acc=k > 0, is_async=True)
            two_extra = warpgroup_mma(w_two, extra, two_extra, use_acc=k > 0, is_async=True)
            one, two, one_extra, two_extra = warpgroup_mma_wait(
                4, deps=[one, two, one_extra, two_extra]
            )
        else:
            one, two = warpgroup_mma_wait(2, deps=[one, two])
        mbarrier.arrive(empty.index((k_block + STAGES - 1) % STAGES), pred=k > 0)
        k_block += 1
    return one, two, one_extra, two_extra


@gluon.jit
def _finish_part(pipeline, k_end, products):
    """Wait for the MMAs of a part's last block, number k_end - 1, and release its stage."""
    empty = pipeline[4]
    STAGES: gl.constexpr = empty.shape[0]
    one, two, one_extra, two_extra = products
    one, two, one_extra, two_extra = warpgroup_mma_wait(0, deps=[one, two, one_extra, two_extra])
    mbarrier.arrive(empty.index((k_end + STAGES - 1) % STAGES))
    return one, two, one_extra, two_extra


@gluon.jit
def _store(value, ptr, row, end, column, stride):
    """Store the transpose of (64, rows) as columns of the rows before `end`."""
    ROWS: gl.constexpr = value.shape[1]
    value = gl.convert_layout(value.permute((1, 0)), _RESULT)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, _RESULT))
    cols = column + gl.arange(0, HALF_M, gl.SliceLayout(0, _RESULT))
    at = rows.to(gl.int64)[:, None] * stride + cols[None, :]
    gl.store(ptr + at, value, mask=(rows < end)[:, None])


@gluon.jit
def _store_result(one, two, ptr, row, end, column, stride, GATED: gl.constexpr):
    """Store silu(one) * two if GATED, or both next to each other."""
    dtype: gl.constexpr = ptr.dtype.element_ty
    if GATED:
        # Rounded as where h is stored.
        gate, up = one.to(dtype).to(gl.float32), two.to(dtype).to(gl.float32)
        _store((silu(gate) * up).to(dtype), ptr, row, end, column, stride)
    else:
        _store(one.to(dtype), ptr, row, end, column, stride)
        _store(two.to(dtype), ptr, row, end, column + WEIGHT_ROWS, stride)


@gluon.jit
def _part(
    CONSUMER: gl.constexpr, consumer_args, order, k_block, place, is_last, then, mailbox,
    local_tile, GATED: gl.constexpr, HAS_EXTRA: gl.constexpr,
):  # fmt: skip
    """Compute and store a part at `place`: its first row, the end of its rows, its first column.

    While the last MMAs of the last part of a tile run, it looks up the next tile. Return that
    tile's number, first row, end of rows and first column; for another part return `then`.
    """
    out_ptr, pipeline, plan, num_k, stride = consumer_args
    first, end, column = place
    tile_id, next_row, next_end, next_column = then
    products = _mma_part(pipeline, k_block, num_k, CONSUMER, GATED, HAS_EXTRA)
    if is_last:
        tile_id = next_tile(mailbox, local_tile)
        next_row, next_end, next_column = _place(tile_id, plan, order)
    one, two, one_extra, two_extra = _finish_part(pipeline, k_block + num_k, products)
    column += CONSUMER * HALF_M
    _store_result(one, two, out_ptr, first, end, column, stride, GATED)
    if HAS_EXTRA:
        _store_result(one_extra, two_extra, out_ptr, first + PART_ROWS, end, column, stride, GATED)
    return tile_id, next_row, next_end, next_column


@gluon.jit
def _consumer(CONSUMER: gl.constexpr, consumer_args, mailbox, order, GATED: gl.constexpr):
    """Cooperative consumer: compute and store half of the columns of every tile."""
    plan, num_k = consumer_args[2], consumer_args[3]
    num_tiles = gl.load(plan[3]) * order[1]
    tile_id, local_tile, k_block = gl.program_id(0), 0, 0
    next_row, next_end, next_column = _place(tile_id, plan, order)
    while tile_id < num_tiles:
        want_tile(mailbox)
        row, end, column = next_row, next_end, next_column
        size = _part_size(row, end)
        for first in range(row, end, size):
            stop = gl.minimum(first + size, end)
            place, then = (first, stop, column), (tile_id, next_row, next_end, next_column)
            part_args = (consumer_args, order, k_block, place, stop == end, then, mailbox)
            if first + PART_ROWS < stop:
                tile_id, next_row, next_end, next_column = _part(
                    CONSUMER, *part_args, local_tile, GATED, True
                )
            else:
                tile_id, next_row, next_end, next_column = _part(
                    CONSUMER, *part_args, local_tile, GATED, False
                )
            k_block += num_k
        local_tile += 1


@gluon.jit(do_not_specialize=["num_n", "num_k", "asks_at"])
def columns_kernel(
    x_ptr,
    token_ptr,
    rows_desc,
    extra_desc,
    w_desc,
    out_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    offsets_ptr,
    num_used_ptr,
    counter_ptr,
    num_n,
    num_k,
    asks_at,
    outer,
    GATED: gl.constexpr,
    GROUP_M: gl.constexpr,
    BY_EXPERT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute out (N, outer): the up projection if GATED, else the down projection.

    GATED: tokens x (T, 64 num_k) are gathered, and the weights are (E * 2 outer, 64 num_k). Else
    rows come by rows_desc and extra_desc, and the weights are (E * outer, 64 num_k).
    counter: one int32 of this launch alone, zero before and after it. asks_at: the block of a part
    after which the program takes its next tile.
    """
    layout: gl.constexpr = w_desc.layout
    row_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, PART_ROWS, _BK], layout)
    extra_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, EXTRA_ROWS, _BK], layout)
    w_bufs = make_buffers(2 * STAGES, w_desc)
    full, empty = make_barriers(STAGES, 1 + 32 * _GATHER_WARPS if GATED else 1, 2)
    pipeline = (row_bufs, extra_bufs, w_bufs, full, empty)
    plan = (tile_expert_ptr, tile_start_ptr, offsets_ptr, num_used_ptr)
    consumer_args = (out_ptr, pipeline, plan, num_k, outer)
    if GATED:
        order = (WEIGHT_ROWS, num_n, outer - WEIGHT_ROWS, GROUP_M, BY_EXPERT)
        load_args = (w_desc, None, None, pipeline, plan, num_k, 2 * outer, outer)
        gather_args = (x_ptr, token_ptr, pipeline, plan, num_k)
        mailbox = make_mailbox(4)
        gl.warp_specialize(
            [
                (_consumer, (0, consumer_args, mailbox, order, GATED)),
                (_consumer, (1, consumer_args, mailbox, order, GATED)),
                (_gather_tokens, (gather_args, mailbox, order)),
                (_load_blocks, (load_args, mailbox, asks_at, order)),
                (dispatch_tiles, (mailbox, num_used_ptr, num_n, counter_ptr)),
            ],
            [4, _GATHER_WARPS, 1, 1],
            [208, 88, 88, 88],
        )
    else:
        order = (2 * WEIGHT_ROWS, num_n, outer - 2 * WEIGHT_ROWS, GROUP_M, BY_EXPERT)
        load_args = (w_desc, rows_desc, extra_desc, pipeline, plan, num_k, outer, WEIGHT_ROWS)
        mailbox = make_mailbox(3)
        gl.warp_specialize(
            [
                (_consumer, (0, consumer_args, mailbox, order, GATED)),
                (_consumer, (1, consumer_args, mailbox, order, GATED)),
                (_load_blocks, (load_args, mailbox, asks_at, order)),
                (dispatch_tiles, (mailbox, num_used_ptr, num_n, counter_ptr)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
