"""Parts of products whose warps have different tasks (Hopper, in Gluon).

One program a multiprocessor. Its producer, one warp, fetches blocks of both factors into a ring of
shared memory, tile after tile. Two groups of four warps multiply; they take tiles in turns, or each
the half of one. In turns one group stores what it has while the other one multiplies, so that the
matrix units do not wait for an epilogue: what the compiler's pipelines (expert_forward.py) cannot.

A tile's halves of 64 rows are what one matrix instruction takes. Halves leave by the copy engine in
panels of 64 columns or more; one in which an expert's rows end is stored with masks.
Shapes as in expert_forward.py; W is an expert's weight, by rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from acmoe.ops.device.gluon_names import load_tile
from acmoe.ops.experts.triton.tiles import tile_of

HALF = gl.constexpr(64)  # rows
PANEL = gl.constexpr(64)  # columns: 128 bytes, as far as shared memory is swizzled
_WARPS = gl.constexpr(4)  # of a group


@gluon.constexpr_function
def accumulator(columns):
    """How a group's threads hold half a tile."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def buffers(NUMBER: gl.constexpr, desc):
    """Shared memory for so many blocks of a matrix."""
    shape: gl.constexpr = [NUMBER, desc.block_shape[0], desc.block_shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def barriers(NUMBER: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """A pair for each buffer: full when all its writers are done, empty when its readers are."""
    full = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(full.index(i), count=WRITERS)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def await_turn(turns, turn, WHICH: gl.constexpr):
    """Until the other group has had the turn before this one.

    A wait tells a barrier's phase only from the ones next to it: a group that came earlier would
    take the ring's round before the last for its own.
    """
    mbarrier.wait(turns.index(WHICH), (turn // 2 & 1) ^ (1 - WHICH))


@gluon.jit
def fetch_blocks(fetch, GROUP: gl.constexpr, ACROSS: gl.constexpr):
    """The producer of rows and weights. w_rows: of W, which is (I, O) if ACROSS, else (O, I)."""
    a_desc, w_desc, ring, plan, num_k, num_n, w_rows = fetch
    a_bufs, w_bufs, full, empty, _ = ring
    tile_expert_ptr, tile_start_ptr, _, live_ptr = plan
    STAGES: gl.constexpr = a_bufs.shape[0]
    BK: gl.constexpr = a_bufs.shape[2]
    BN: gl.constexpr = w_bufs.shape[2] if ACROSS else w_bufs.shape[1]
    live = gl.load(live_ptr)
    at = 0
    for place in range(gl.program_id(0), live * num_n, gl.num_programs(0)):
        tile, n_tile = tile_of(place, live, num_n, GROUP)
        row = gl.load(tile_start_ptr + tile)
        w_row = gl.load(tile_expert_ptr + tile) * w_rows
        for k in range(num_k):
            slot = at % STAGES
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready, a_desc.block_type.nbytes + w_desc.block_type.nbytes)
            load_tile(a_desc, [row, k * BK], ready, a_bufs.index(slot))
            if ACROSS:
                corner = [w_row + k * BK, n_tile * BN]
            else:
                corner = [w_row + n_tile * BN, k * BK]
            load_tile(w_desc, corner, ready, w_bufs.index(slot))
            at += 1


@gluon.jit
def _multiply(
    ring, upper, lower, at, num_k, WHICH: gl.constexpr, ACROSS: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
    """The tile whose first block is the ring's at-th; its lower half only if HALVES is 2."""
    a_bufs, w_bufs, full, empty, turns = ring
    STAGES: gl.constexpr = a_bufs.shape[0]
    for k in range(num_k):
        slot = at % STAGES
        mbarrier.wait(full.index(slot), at // STAGES & 1)
        a = a_bufs.index(slot)
        w = w_bufs.index(slot)
        if not ACROSS:
            w = w.permute((1, 0))
        upper = warpgroup_mma(a.slice(0, HALF), w, upper, use_acc=k > 0, is_async=True)
        # Afterwards those of the step before are done, and its block is free.
        if HALVES == 2:
            lower = warpgroup_mma(a.slice(HALF, HALF), w, lower, use_acc=k > 0, is_async=True)
            upper, lower = warpgroup_mma_wait(2, deps=[upper, lower])
        else:
            upper = warpgroup_mma_wait(1, deps=[upper])
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=k > 0)
        at += 1
    mbarrier.arrive(turns.index(1 - WHICH))
    if HALVES == 2:
        upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
    else:
        upper = warpgroup_mma_wait(0, deps=[upper])
    mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES))
    return upper, lower


@gluon.jit
def multiply(ring, turn, rows, num_k, WHICH: gl.constexpr, ACROSS: gl.constexpr):
    """Both halves of the program's turn-th tile, of so many rows."""
    w_bufs = ring[1]
    BN: gl.constexpr = w_bufs.shape[2] if ACROSS else w_bufs.shape[1]
    upper = gl.zeros([HALF, BN], gl.float32, accumulator(BN))
    lower = gl.zeros([HALF, BN], gl.float32, accumulator(BN))
    await_turn(ring[4], turn, WHICH)
    at = turn * num_k
    if rows > HALF:
        upper, lower = _multiply(ring, upper, lower, at, num_k, WHICH, ACROSS, 2)
    else:
        upper, lower = _multiply(ring, upper, lower, at, num_k, WHICH, ACROSS, 1)
    return upper, lower


@gluon.jit
def panels_of(half):
    """The left and the right 64 of 128 columns, which no thread hands to another."""
    left, right = gl.split(half.reshape(HALF, 2, PANEL).permute(0, 2, 1))
    left = gl.convert_layout(left, accumulator(PANEL), assert_trivial=True)
    return left, gl.convert_layout(right, accumulator(PANEL), assert_trivial=True)


@gluon.jit
def store_masked(buf, ptr, row, end, column, stride):
    """Those of a half's rows that stand before the end."""
    BN: gl.constexpr = buf.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BN, BN // 8], [_WARPS, 1], [1, 0])
    rows = row + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    cols = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
    ptrs = ptr + rows[:, None].to(gl.int64) * stride + cols[None, :]
    gl.store(ptrs, buf.load(layout), mask=(rows < end)[:, None])
