"""Rows times their experts' weights by a ring of shared memory (ring.py).

in turns    each group its own tile: the stores of one stand beside the products of the other
together    each group half of a tile twice as wide, which reads less; one starts later than the
            other by a few steps, and so do its stores

Which is faster, or the compiler's pipeline, depends on the shape (H200; tuned.json): 1.26
for 1.41 ms (down, qwen30b, in turns), 1.50 for 1.57 (down, olmoe, together), 6.48 for 6.24 (input,
mixtral, together).
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

from acmoe.ops.device.gluon_names import store_tile, thread_barrier
from acmoe.ops.experts.hopper.pipeline import (
    HALF,
    accumulator,
    barriers,
    buffers,
    fetch_blocks,
    multiply,
    store_masked,
)
from acmoe.ops.experts.triton.tiles import tile_of


@gluon.jit
def _store_half(acc, buf, y_desc, y_ptr, row, end, column, O):
    tma.store_wait(0)  # the half before has left the buffer
    thread_barrier()
    buf.store(acc.to(buf.dtype))
    fence_async_shared()
    if row + HALF <= end:
        store_tile(y_desc, [row, column], buf)
    else:
        store_masked(buf, y_ptr, row, end, column, O)


@gluon.jit
def _turns(WHICH: gl.constexpr, work, GROUP: gl.constexpr, ACROSS: gl.constexpr):
    """Every second tile of the program."""
    y_desc, y_ptr, y_bufs, ring, plan, num_k, num_n, O = work
    tile_expert_ptr, tile_start_ptr, end_ptr, live_ptr = plan
    BN: gl.constexpr = y_bufs.shape[2]
    live = gl.load(live_ptr)
    programs = gl.num_programs(0)
    turn = WHICH
    buf = y_bufs.index(WHICH)
    for place in range(gl.program_id(0) + WHICH * programs, live * num_n, 2 * programs):
        tile, n_tile = tile_of(place, live, num_n, GROUP)
        row = gl.load(tile_start_ptr + tile)
        end = gl.load(end_ptr + gl.load(tile_expert_ptr + tile)).to(gl.int32)
        upper, lower = multiply(ring, turn, end - row, num_k, WHICH, ACROSS)
        _store_half(upper, buf, y_desc, y_ptr, row, end, n_tile * BN, O)
        _store_half(lower, buf, y_desc, y_ptr, row + HALF, end, n_tile * BN, O)
        turn += 2
    tma.store_wait(0)


@gluon.jit
def _multiply_half(ring, ahead, at, num_k, half, ACROSS: gl.constexpr, LEAD: gl.constexpr):
    """This half of a tile, whose first block is the ring's at-th."""
    a_bufs, w_bufs, full, empty, _ = ring
    STAGES: gl.constexpr = a_bufs.shape[0]
    BN: gl.constexpr = w_bufs.shape[2] if ACROSS else w_bufs.shape[1]
    acc = gl.zeros([HALF, BN], gl.float32, accumulator(BN))
    for k in range(num_k):
        slot = at % STAGES
        mbarrier.wait(full.index(slot), at // STAGES & 1)
        a = a_bufs.index(slot).slice(half * HALF, HALF)
        w = w_bufs.index(slot)
        if not ACROSS:
            w = w.permute((1, 0))
        acc = warpgroup_mma(a, w, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=k > 0)
        if LEAD > 0:
            mbarrier.arrive(ahead, pred=k == LEAD - 1)
        at += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES))
    return acc


@gluon.jit
def _halves(
    WHICH: gl.constexpr, work, GROUP: gl.constexpr, ACROSS: gl.constexpr, LEAD: gl.constexpr
):  # fmt: skip
    """The upper or the lower half of every tile of the program."""
    y_desc, y_ptr, y_bufs, ring, plan, num_k, num_n, O = work
    tile_expert_ptr, tile_start_ptr, end_ptr, live_ptr = plan
    _, _, full, empty, turns = ring
    ahead = turns.index(0)
    STAGES: gl.constexpr = full.shape[0]
    BN: gl.constexpr = y_bufs.shape[2] * 2
    live = gl.load(live_ptr)
    at = 0
    buf = y_bufs.index(WHICH)
    for place in range(gl.program_id(0), live * num_n, gl.num_programs(0)):
        tile, n_tile = tile_of(place, live, num_n, GROUP)
        row = gl.load(tile_start_ptr + tile) + WHICH * HALF
        end = gl.load(end_ptr + gl.load(tile_expert_ptr + tile)).to(gl.int32)
        if LEAD > 0 and WHICH == 1:
            mbarrier.wait(ahead, at // num_k & 1)
        if row < end:
            acc = _multiply_half(ring, ahead, at, num_k, WHICH, ACROSS, LEAD * (1 - WHICH))
            left, right = gl.split(acc.reshape(HALF, 2, BN // 2).permute(0, 2, 1))
            _store_half(left, buf, y_desc, y_ptr, row, end, n_tile * BN, O)
            _store_half(right, buf, y_desc, y_ptr, row, end, n_tile * BN + BN // 2, O)
        else:  # no rows, but the ring goes round
            for k in range(num_k):
                mbarrier.wait(full.index((at + k) % STAGES), (at + k) // STAGES & 1)
                mbarrier.arrive(empty.index((at + k) % STAGES))
        at += num_k
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_k", "num_n"])
def rows_by_ring(
    a_desc,
    w_desc,
    y_desc,
    y_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    end_ptr,
    live_ptr,
    num_k,
    num_n,
    w_rows,
    O,
    GROUP: gl.constexpr,
    ACROSS: gl.constexpr,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
    LEAD: gl.constexpr,
):
    """As `rows_kernel` without biases, of a (N, I) that holds rows.

    TOGETHER: num_k >= STAGES >= LEAD, the steps by which the second group is late.
    """
    a_bufs = buffers(STAGES, a_desc)
    w_bufs = buffers(STAGES, w_desc)
    y_bufs = buffers(2, y_desc)
    full, empty = barriers(STAGES, 1, 2 if TOGETHER else 1)
    turns, _ = barriers(1 if TOGETHER else 2, 1, 1)
    ring = (a_bufs, w_bufs, full, empty, turns)
    plan = (tile_expert_ptr, tile_start_ptr, end_ptr, live_ptr)
    work = (y_desc, y_ptr, y_bufs, ring, plan, num_k, num_n, O)
    fetch = (a_desc, w_desc, ring, plan, num_k, num_n, w_rows)
    if TOGETHER:
        gl.warp_specialize(
            [
                (_halves, (0, work, GROUP, ACROSS, LEAD)),
                (_halves, (1, work, GROUP, ACROSS, LEAD)),
                (fetch_blocks, (fetch, GROUP, ACROSS)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_turns, (0, work, GROUP, ACROSS)),
                (_turns, (1, work, GROUP, ACROSS)),
                (fetch_blocks, (fetch, GROUP, ACROSS)),
            ],
            [4, 1],
            [240, 24],
        )
