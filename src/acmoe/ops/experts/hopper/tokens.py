"""Gradients of the expert weights by a ring (ring_weights.py), one factor of which holds tokens.

Two warps fetch the tokens of a block's rows, 16 bytes a copy, and nobody waits for these before
the products do; the copy engine fetches the other factor. Tokens are the narrow side of a tile, 128
features: what is gathered passes the load units, what the copy engine fetches does not.

Against Triton's pipeline: 344 for 441 us and 634 for 841 (H200, fine, second and first weight);
with 40% of the rows at one expert 1256 for 1344 and 1443 for 1363.

T tokens, N rows, D features; the other factor, r (N, R), holds rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from acmoe.ops.device.gluon_names import load_rows, load_tile
from acmoe.ops.experts.hopper.pipeline import HALF, barriers, buffers
from acmoe.ops.experts.hopper.weights import multiply_half, store_panel, tile_at

# Two, with one for the copy engine: more than four beside the groups would leave too few registers.
_WARPS = gl.constexpr(2)  # that gather


@gluon.jit
def _copy_rest(ptr, row, end, column, width, buf):
    """Rows from `row` to the end, and zeros to fill a block."""
    BK: gl.constexpr = buf.shape[0]
    BN: gl.constexpr = buf.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [_WARPS, 1], [1, 0])
    rows = row + gl.arange(0, BK, gl.SliceLayout(1, layout))
    cols = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
    ptrs = ptr + rows[:, None].to(gl.int64) * width + cols[None, :]
    load_rows(buf, ptrs, mask=(rows < end)[:, None])


@gluon.jit
def _fetch_rows(r_desc, ring, sizes, GROUP: gl.constexpr):
    """One producer: whole blocks of rows, by the copy engine."""
    r_bufs, full, empty = ring[1], ring[2], ring[3]
    num_tiles = sizes[1]
    STAGES: gl.constexpr = r_bufs.shape[0]
    BK: gl.constexpr = r_bufs.shape[1]
    at = 0
    for place in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, begin, end, _, first_r = tile_at(place, sizes, GROUP)
        for row in range(begin, end, BK):
            slot = at % STAGES
            ready = full.index(slot)
            whole = row + BK <= end
            mbarrier.wait(empty.index(slot), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready, r_desc.block_type.nbytes, pred=whole)
            load_tile(r_desc, [row, first_r], ready, r_bufs.index(slot), pred=whole)
            mbarrier.arrive(ready, pred=row + BK > end)
            at += 1


@gluon.jit
def _fetch_tokens(fetch, GROUP: gl.constexpr):
    """The other: tokens, and the last rows, fewer than a block. The tokens of the next block are
    looked up a block ahead."""
    t_ptr, token_ptr, r_ptr, ring, sizes = fetch
    t_bufs, r_bufs, full, empty = ring
    num_tiles, D, R = sizes[1], sizes[2], sizes[3]
    STAGES: gl.constexpr = r_bufs.shape[0]
    BK: gl.constexpr = r_bufs.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_WARPS, 1], [1, 0])
    step = gl.arange(0, BK, gl.SliceLayout(1, layout))
    cols = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    at = 0
    for place in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, begin, end, first_d, first_r = tile_at(place, sizes, GROUP)
        token = gl.load(token_ptr + begin + step, mask=begin + step < end, other=0)
        for row in range(begin, end, BK):
            ahead = row + BK + step
            following = gl.load(token_ptr + ahead, mask=ahead < end, other=0)
            ptrs = t_ptr + first_d + token.to(gl.int64)[:, None] * D + cols[None, :]
            inside = (row + step < end)[:, None]
            slot = at % STAGES
            mbarrier.wait(empty.index(slot), (at // STAGES & 1) ^ 1)
            for half in gl.static_range(2):
                buf = t_bufs.index(2 * slot + half)
                load_rows(buf, ptrs + half * HALF, mask=inside)
            if row + BK > end:
                _copy_rest(r_ptr, row, end, first_r, R, r_bufs.index(slot))
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            token = following
            at += 1


@gluon.jit
def _halves(WHICH: gl.constexpr, work, GROUP: gl.constexpr, TURNED: gl.constexpr):
    """The upper or the lower half of every tile of the program."""
    dw_desc, dw_bufs, ring, sizes = work
    r_bufs = ring[1]
    BK: gl.constexpr = r_bufs.shape[1]
    BN: gl.constexpr = r_bufs.shape[2]
    num_tiles, D, R = sizes[1], sizes[2], sizes[3]
    buf = dw_bufs.index(WHICH)
    at = 0
    for place in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, begin, end, first_d, first_r = tile_at(place, sizes, GROUP)
        blocks = (end - begin + BK - 1) // BK
        acc = multiply_half(ring, at, blocks, WHICH, True)
        at += blocks
        left, right = gl.split(acc.reshape(HALF, 2, BN // 2).permute(0, 2, 1))
        d = first_d + WHICH * HALF
        if TURNED:
            row = expert * R + first_r
            store_panel(left, buf.permute((1, 0)), buf, dw_desc, row, d)
            store_panel(right, buf.permute((1, 0)), buf, dw_desc, row + BN // 2, d)
        else:
            store_panel(left, buf, buf, dw_desc, expert * D + d, first_r)
            store_panel(right, buf, buf, dw_desc, expert * D + d, first_r + BN // 2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles"])
def weights_of_tokens(
    t_ptr,
    token_ptr,
    r_desc,
    r_ptr,
    dw_desc,
    end_ptr,
    num_tiles,
    D,
    R,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    TURNED: gl.constexpr,
):
    """dw (E * D, R), or, TURNED, (E * R, D): of each expert's rows the sum of t^T r, or r^T t."""
    t_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HALF], r_desc.dtype)
    t_bufs = gl.allocate_shared_memory(
        r_desc.dtype, [2 * STAGES, r_desc.block_shape[0], HALF], t_layout
    )
    r_bufs = buffers(STAGES, r_desc)
    dw_bufs = buffers(2, dw_desc)
    full, empty = barriers(STAGES, 1 + 32 * _WARPS, 2)
    ring = (t_bufs, r_bufs, full, empty)
    sizes = (end_ptr, num_tiles, D, R)
    work = (dw_desc, dw_bufs, ring, sizes)
    fetch = (t_ptr, token_ptr, r_ptr, ring, sizes)
    gl.warp_specialize(
        [
            (_halves, (0, work, GROUP, TURNED)),
            (_halves, (1, work, GROUP, TURNED)),
            (_fetch_tokens, (fetch, GROUP)),
            (_fetch_rows, (r_desc, ring, sizes, GROUP)),
        ],
        [4, _WARPS, 1],
        [208, 88, 88],
    )
