"""Gradients of the expert weights by a ring of shared memory (ring.py).

Each group of warps has half of a tile, 64 outputs by 256 inputs. The copy engine fetches whole
blocks of an expert's rows; its last rows, fewer than a block, the producer's own threads: behind
them stand the next expert's rows, or some that nobody wrote, and must be zeros.

Shapes as in expert_forward.py. p (N, O) and q (N, I) both hold rows.
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

from acmoe.ops.device.gluon_names import load_tile, store_tile, thread_barrier
from acmoe.ops.experts.hopper.pipeline import HALF, PANEL, accumulator, barriers, buffers
from acmoe.ops.experts.triton.tiles import tile_of


@gluon.jit
def tile_at(place, sizes, GROUP: gl.constexpr):
    """Expert, its rows' begin and end, first output and first input of a tile."""
    end_ptr, _, O, I = sizes
    num_o, num_i = O // 128, I // 256
    expert = place // (num_o * num_i)
    tile_o, tile_i = tile_of(place % (num_o * num_i), num_o, num_i, GROUP)
    end = gl.load(end_ptr + expert).to(gl.int32)
    before = gl.load(end_ptr + gl.maximum(expert - 1, 0)).to(gl.int32)
    begin = gl.where(expert > 0, before, 0)
    return expert, begin, end, tile_o * 128, tile_i * 256


@gluon.jit
def _rest(ptr, row, end, column, width, BK: gl.constexpr, BN: gl.constexpr):
    """Rows from `row` to the end, and zeros to fill a block."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [4, 1], [1, 0])
    rows = row + gl.arange(0, BK, gl.SliceLayout(1, layout))
    cols = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
    ptrs = ptr + rows[:, None].to(gl.int64) * width + cols[None, :]
    return gl.load(ptrs, mask=(rows < end)[:, None], other=0.0)


@gluon.jit
def _fetch(fetch, GROUP: gl.constexpr):
    """The producer. Four warps, for the sake of the last rows."""
    p_desc, q_desc, p_ptr, q_ptr, ring, sizes = fetch
    p_bufs, q_bufs, full, empty = ring
    num_tiles, O, I = sizes[1], sizes[2], sizes[3]
    STAGES: gl.constexpr = q_bufs.shape[0]
    BK: gl.constexpr = q_bufs.shape[1]
    BN: gl.constexpr = q_bufs.shape[2]
    at = 0
    for place in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, begin, end, first_o, first_i = tile_at(place, sizes, GROUP)
        whole = begin + (end - begin) // BK * BK
        for row in range(begin, whole, BK):
            slot = at % STAGES
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready, 2 * p_desc.block_type.nbytes + q_desc.block_type.nbytes)
            for half in gl.static_range(2):
                corner = [row, first_o + half * HALF]
                load_tile(p_desc, corner, ready, p_bufs.index(2 * slot + half))
            load_tile(q_desc, [row, first_i], ready, q_bufs.index(slot))
            at += 1
        if whole < end:
            # Fetched before the wait for a place, which hides how long that takes.
            upper = _rest(p_ptr, whole, end, first_o, O, BK, PANEL)
            lower = _rest(p_ptr, whole, end, first_o + HALF, O, BK, PANEL)
            q = _rest(q_ptr, whole, end, first_i, I, BK, BN)
            slot = at % STAGES
            mbarrier.wait(empty.index(slot), (at // STAGES & 1) ^ 1)
            p_bufs.index(2 * slot).store(upper)
            p_bufs.index(2 * slot + 1).store(lower)
            q_bufs.index(slot).store(q)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(full.index(slot))
            at += 1


@gluon.jit
def multiply_half(ring, at, blocks, WHICH: gl.constexpr, FENCED: gl.constexpr):
    """This half of a tile, whose first block is the ring's at-th.

    FENCED: threads copied some of it, which the matrix units see only behind a fence.
    """
    p_bufs, q_bufs, full, empty = ring
    STAGES: gl.constexpr = q_bufs.shape[0]
    BN: gl.constexpr = q_bufs.shape[2]
    acc = gl.zeros([HALF, BN], gl.float32, accumulator(BN))
    for k in range(blocks):
        slot = at % STAGES
        mbarrier.wait(full.index(slot), at // STAGES & 1)
        if FENCED:
            fence_async_shared()
        p = p_bufs.index(2 * slot + WHICH).permute((1, 0))
        acc = warpgroup_mma(p, q_bufs.index(slot), acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=k > 0)
        at += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=blocks > 0)
    return acc


@gluon.jit
def store_panel(acc, view, buf, dw_desc, row, column):
    """By way of the buffer, which its view may show turned."""
    tma.store_wait(0)  # what was here before has left the buffer
    thread_barrier()
    view.store(acc.to(buf.dtype))
    fence_async_shared()
    store_tile(dw_desc, [row, column], buf)


@gluon.jit
def _halves(WHICH: gl.constexpr, work, GROUP: gl.constexpr):
    """The upper or the lower half of every tile of the program."""
    dw_desc, dw_bufs, ring, sizes = work
    q_bufs = ring[1]
    BK: gl.constexpr = q_bufs.shape[1]
    BN: gl.constexpr = q_bufs.shape[2]
    num_tiles, O = sizes[1], sizes[2]
    buf = dw_bufs.index(WHICH)
    at = 0
    for place in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, begin, end, first_o, first_i = tile_at(place, sizes, GROUP)
        blocks = (end - begin + BK - 1) // BK
        acc = multiply_half(ring, at, blocks, WHICH, False)
        at += blocks
        left, right = gl.split(acc.reshape(HALF, 2, BN // 2).permute(0, 2, 1))
        row = expert * O + first_o + WHICH * HALF
        store_panel(left, buf, buf, dw_desc, row, first_i)
        store_panel(right, buf, buf, dw_desc, row, first_i + BN // 2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles"])
def weights_together(
    p_desc,
    q_desc,
    dw_desc,
    p_ptr,
    q_ptr,
    end_ptr,
    num_tiles,
    O,
    I,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """dw (E * O, I): of each expert's rows the sum of p^T q."""
    p_bufs = buffers(2 * STAGES, p_desc)
    q_bufs = buffers(STAGES, q_desc)
    dw_bufs = buffers(2, dw_desc)
    full, empty = barriers(STAGES, 1, 2)
    ring = (p_bufs, q_bufs, full, empty)
    sizes = (end_ptr, num_tiles, O, I)
    work = (dw_desc, dw_bufs, ring, sizes)
    fetch = (p_desc, q_desc, p_ptr, q_ptr, ring, sizes)
    gl.warp_specialize(
        [
            (_halves, (0, work, GROUP)),
            (_halves, (1, work, GROUP)),
            (_fetch, (fetch, GROUP)),
        ],
        [4, 4],
        [192, 128],
    )
