"""Grouped GEMM with a multistage TMA pipeline for the gradients of the expert weights.

dw[e] (O, I) = p^T q summed over the rows of expert e, for p (N, O) and q (N, I) that both hold
sorted rows; dw is (E * O, I). Persistent and cooperative (pipeline.py): one program a
multiprocessor, two consumer warpgroups that compute the upper and lower 64 rows of a (128, 256)
tile of one expert's dw, and a producer, which loads blocks of 64 rows by TMA. The rows of an expert
are followed by the next expert's, or by rows that were never written: its last block, of fewer than
64 rows, is filled up with zeros (ragged.py).

Experts of a few hundred rows have few blocks, so that whatever the MMAs wait for between two tiles
counts. A consumer has shared memory for half of its accumulator. It stores the left panel at the
end of a tile, and keeps the right one in registers until the first MMAs of its next tile run:
by then TMA has read the left one. It looks up its next tile while the last MMAs of a tile run.
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
from acmoe.ops.device.gluon_names import load_tile, store_tile, thread_barrier
from acmoe.ops.experts.hopper.ragged import load_expert_rows
from acmoe.ops.experts.triton.tiles import tile_coords


@gluon.jit
def tile_at(tile_id, sizes, GROUP_M: gl.constexpr):
    """Return a tile's expert, begin and end of its rows, and the first row and column of dw[e].

    Where O is no multiple of 128, or I of 256, the last tile begins earlier, so that it ends at the
    edge; what two tiles share is stored twice, with equal values.
    """
    offsets_ptr, _, O, I = sizes
    num_o, num_i = (O + 127) // 128, (I + 255) // 256
    expert = tile_id // (num_o * num_i)
    tile_o, tile_i = tile_coords(tile_id % (num_o * num_i), num_o, num_i, GROUP_M)
    end = gl.load(offsets_ptr + expert).to(gl.int32)
    before = gl.load(offsets_ptr + gl.maximum(expert - 1, 0)).to(gl.int32)
    begin = gl.where(expert > 0, before, 0)
    first_o, first_i = gl.minimum(tile_o * 128, O - 128), gl.minimum(tile_i * 256, I - 256)
    return expert, begin, end, first_o, first_i


@gluon.jit
def _load(load_args, GROUP_M: gl.constexpr):
    """Producer: load the blocks of p and q of all tiles of the program into the pipeline.

    An expert's last block, where it has fewer than BK rows, comes by the descriptors of ragged.py.
    With these for all blocks mixtral22b took 5% longer where all blocks are full (H200).
    """
    p_desc, q_desc, p_last_desc, q_last_desc, pipeline, sizes = load_args
    p_bufs, q_bufs, full, empty = pipeline
    num_tiles = sizes[1]
    STAGES: gl.constexpr = q_bufs.shape[0]
    BK: gl.constexpr = q_bufs.shape[1]
    BLOCK_BYTES: gl.constexpr = 2 * p_desc.block_type.nbytes + q_desc.block_type.nbytes
    k_block = 0
    for tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, begin, end, first_o, first_i = tile_at(tile_id, sizes, GROUP_M)
        last = begin + (end - begin) // BK * BK
        for row in range(begin, last, BK):
            stage = k_block % STAGES
            full_bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
            mbarrier.expect(full_bar, BLOCK_BYTES)
            for half in gl.static_range(2):
                coord = [row, first_o + half * HALF_M]
                load_tile(p_desc, coord, full_bar, p_bufs.index(2 * stage + half))
            load_tile(q_desc, [row, first_i], full_bar, q_bufs.index(stage))
            k_block += 1
        if last < end:
            stage = k_block % STAGES
            full_bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
            mbarrier.expect(full_bar, BLOCK_BYTES)
            for half in gl.static_range(2):
                buf = p_bufs.index(2 * stage + half)
                load_expert_rows(p_last_desc, last, end, first_o + half * HALF_M, full_bar, buf)
            load_expert_rows(q_last_desc, last, end, first_i, full_bar, q_bufs.index(stage))
            k_block += 1


@gluon.jit
def store_panel(panel, buf, dw_desc, row, column, TRANSPOSED: gl.constexpr):
    """Store a panel (64, 128) as dw[row:row + 64, column:] by TMA, through `buf`.

    TRANSPOSED: store its transpose, as dw[column:column + 128, row:].
    """
    tma.store_wait(0)  # the previous store has read the buffer
    thread_barrier()
    if TRANSPOSED:
        buf.permute((1, 0)).store(panel)
        fence_async_shared()
        store_tile(dw_desc, [column, row], buf)
    else:
        buf.store(panel)
        fence_async_shared()
        store_tile(dw_desc, [row, column], buf)


@gluon.jit
def store_kept(kept, buf, dw_desc, TRANSPOSED: gl.constexpr):
    """Store the panel that a consumer kept from the tile before; there is none in the first."""
    panel, row, column, exists = kept
    if exists:
        store_panel(panel, buf, dw_desc, row, column, TRANSPOSED)


@gluon.jit
def mma_half(
    pipeline, k_block, blocks, kept, buf, dw_desc, CONSUMER: gl.constexpr, FENCE: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Issue the MMAs of half a tile, and store the kept panel behind the first ones.

    Return the accumulator; the MMAs of its last block may still run (`finish_half`). The first
    block is number k_block of the pipeline. FENCE: threads wrote some of the operands by cp.async,
    which wgmma sees only after a proxy fence.
    """
    p_bufs, q_bufs, full, empty = pipeline
    STAGES: gl.constexpr = q_bufs.shape[0]
    BN: gl.constexpr = q_bufs.shape[2]
    acc = gl.zeros([HALF_M, BN], gl.float32, acc_layout(BN))
    for k in range(blocks):
        stage = k_block % STAGES
        mbarrier.wait(full.index(stage), k_block // STAGES & 1)
        if FENCE:
            fence_async_shared()
        p = p_bufs.index(2 * stage + CONSUMER).permute((1, 0))
        acc = warpgroup_mma(p, q_bufs.index(stage), acc, use_acc=k > 0, is_async=True)
        if k == 0:
            store_kept(kept, buf, dw_desc, TRANSPOSED)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((k_block + STAGES - 1) % STAGES), pred=k > 0)
        k_block += 1
    if blocks == 0:
        store_kept(kept, buf, dw_desc, TRANSPOSED)
    return acc


@gluon.jit
def finish_half(pipeline, k_end, blocks, acc):
    """Wait for the MMAs of a tile's last block, number k_end - 1, and release its stage.

    Return the left and the right panel (64, 128) of the accumulator.
    """
    empty = pipeline[3]
    STAGES: gl.constexpr = empty.shape[0]
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((k_end + STAGES - 1) % STAGES), pred=blocks > 0)
    BN: gl.constexpr = acc.shape[1]
    left, right = gl.split(acc.reshape(HALF_M, 2, BN // 2).permute(0, 2, 1))
    left = gl.convert_layout(left, acc_layout(BN // 2), assert_trivial=True)
    return left, gl.convert_layout(right, acc_layout(BN // 2), assert_trivial=True)


@gluon.jit
def cooperative_consumer(
    CONSUMER: gl.constexpr, consumer_args, GROUP_M: gl.constexpr, FENCE: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Cooperative consumer: compute and store the upper or lower half of every tile.

    FENCE as in `mma_half`; TRANSPOSED: dw is (E * I, O).
    """
    dw_desc, dw_bufs, pipeline, sizes = consumer_args
    q_bufs = pipeline[1]
    BK: gl.constexpr = q_bufs.shape[1]
    HALF_N: gl.constexpr = q_bufs.shape[2] // 2
    _, num_tiles, O, I = sizes
    programs = gl.num_programs(0)
    buf = dw_bufs.index(CONSUMER)
    k_block, row, column = 0, 0, 0
    kept = gl.zeros([HALF_M, HALF_N], dw_desc.dtype, acc_layout(HALF_N))
    first_tile = gl.minimum(gl.program_id(0), num_tiles - 1)
    expert, begin, end, first_o, first_i = tile_at(first_tile, sizes, GROUP_M)
    for tile_id in range(gl.program_id(0), num_tiles, programs):
        blocks = (end - begin + BK - 1) // BK
        kept_panel = (kept, row, column + HALF_N, tile_id >= programs)
        acc = mma_half(
            pipeline, k_block, blocks, kept_panel, buf, dw_desc, CONSUMER, FENCE, TRANSPOSED
        )
        k_block += blocks
        row, column = first_o + CONSUMER * HALF_M, first_i
        if TRANSPOSED:
            column += expert * I
        else:
            row += expert * O
        next_tile = gl.minimum(tile_id + programs, num_tiles - 1)
        expert, begin, end, first_o, first_i = tile_at(next_tile, sizes, GROUP_M)
        left, right = finish_half(pipeline, k_block, blocks, acc)
        store_panel(left.to(dw_desc.dtype), buf, dw_desc, row, column, TRANSPOSED)
        kept = right.to(dw_desc.dtype)
    last_panel = (kept, row, column + HALF_N, gl.program_id(0) < num_tiles)
    store_kept(last_panel, buf, dw_desc, TRANSPOSED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles"])
def weight_gradient_kernel(
    p_desc,
    q_desc,
    p_last_desc,
    q_last_desc,
    dw_desc,
    offsets_ptr,
    num_tiles,
    O,
    I,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute dw (E * O, I): for each expert the sum of p^T q over its rows."""
    p_bufs = make_buffers(2 * STAGES, p_desc)
    q_bufs = make_buffers(STAGES, q_desc)
    dw_bufs = make_buffers(2, dw_desc)
    full, empty = make_barriers(STAGES, 1, 2)
    pipeline = (p_bufs, q_bufs, full, empty)
    sizes = (offsets_ptr, num_tiles, O, I)
    consumer_args = (dw_desc, dw_bufs, pipeline, sizes)
    load_args = (p_desc, q_desc, p_last_desc, q_last_desc, pipeline, sizes)
    gl.warp_specialize(
        [
            (cooperative_consumer, (0, consumer_args, GROUP_M, False, False)),
            (cooperative_consumer, (1, consumer_args, GROUP_M, False, False)),
            (_load, (load_args, GROUP_M)),
        ],
        [4, 4],  # with one producer warp it takes 3 to 5% longer where loads are equal (H200)
        [240, 24],
    )
