"""As ring_hidden.py, by both groups of warps together: each half of a tile of 256 columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from acmoe.kernels.activation import activate
from acmoe.kernels.ring import (
    HALF,
    PANEL,
    accumulator,
    barriers,
    buffers,
    fetch_blocks,
    panels_of,
    store_masked,
)
from acmoe.kernels.ring_hidden import _gate_of
from acmoe.kernels.ring_rows import _multiply_half
from acmoe.kernels.tiles import tile_of

_PANELS = gl.constexpr(4)  # of a group's half


@gluon.jit
def _fetch_h(WHICH: gl.constexpr, h_desc, panels, plan, num_n, F, GROUP: gl.constexpr):
    """Gate and up of a group's panels."""
    h_bufs, _, full, empty = panels
    tile_expert_ptr, tile_start_ptr, end_ptr, live_ptr = plan
    BUFFERS: gl.constexpr = full.shape[0] // 2
    live = gl.load(live_ptr)
    at = 0
    for place in range(gl.program_id(0), live * num_n, gl.num_programs(0)):
        tile, n_tile = tile_of(place, live, num_n, GROUP)
        row = gl.load(tile_start_ptr + tile) + WHICH * HALF
        end = gl.load(end_ptr + gl.load(tile_expert_ptr + tile)).to(gl.int32)
        if row < end:
            for panel in range(_PANELS):
                slot = WHICH * BUFFERS + at % BUFFERS
                ready = full.index(slot)
                mbarrier.wait(empty.index(slot), (at // BUFFERS & 1) ^ 1)
                mbarrier.expect(ready, 2 * h_desc.block_type.nbytes)
                column = (n_tile * _PANELS + panel) * PANEL
                for part in gl.static_range(2):
                    corner = [row, part * F + column]
                    buf = h_bufs.index(2 * slot + part)
                    tma.async_copy_global_to_shared(h_desc, corner, ready, buf)
                at += 1


@gluon.jit
def _differentiate(da, gate, at, panels, outs, row, end, column, WHICH: gl.constexpr):
    """dh and gate * a of a panel, the group's at-th; sums of da * a by rows."""
    h_bufs, a_bufs, full, empty = panels
    dh_desc, a_desc, dh_ptr, a_ptr, F = outs
    BUFFERS: gl.constexpr = full.shape[0] // 2
    dtype: gl.constexpr = a_bufs.dtype
    slot = WHICH * BUFFERS + at % BUFFERS
    mbarrier.wait(full.index(slot), at // BUFFERS & 1)
    h_buf, u_buf, a_buf = h_bufs.index(2 * slot), h_bufs.index(2 * slot + 1), a_bufs.index(WHICH)
    h = h_buf.load(accumulator(PANEL)).to(gl.float32)
    u = u_buf.load(accumulator(PANEL)).to(gl.float32)
    a, slope, slope_u = activate(h, u, "swiglu")
    share = gl.sum(da * a, axis=1)
    gate = gate[:, None]
    d = da * gate
    h_buf.store((d * slope).to(dtype))
    u_buf.store((d * slope_u).to(dtype))
    a_buf.store((a * gate).to(dtype))
    fence_async_shared()
    if row + HALF <= end:
        tma.async_copy_shared_to_global(dh_desc, [row, column], h_buf)
        tma.async_copy_shared_to_global(dh_desc, [row, F + column], u_buf)
        tma.async_copy_shared_to_global(a_desc, [row, column], a_buf)
        tma.store_wait(0)
    else:
        store_masked(h_buf, dh_ptr, row, end, column, 2 * F)
        store_masked(u_buf, dh_ptr, row, end, column + F, 2 * F)
        store_masked(a_buf, a_ptr, row, end, column, F)
        fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(empty.index(slot))
    return share


@gluon.jit
def _halves(WHICH: gl.constexpr, work, GROUP: gl.constexpr, LEAD: gl.constexpr):
    """The upper or the lower half of every tile: multiplied, differentiated, stored."""
    ring, panels, outs, gates, plan, num_k, num_n = work
    tile_expert_ptr, tile_start_ptr, end_ptr, live_ptr = plan
    gate_ptr, order_ptr, share_ptr, num_rows = gates
    _, w_bufs, full, empty, turns = ring
    ahead = turns.index(0)
    STAGES: gl.constexpr = full.shape[0]
    BN: gl.constexpr = w_bufs.shape[2]
    live = gl.load(live_ptr)
    at = 0
    panel = 0
    for place in range(gl.program_id(0), live * num_n, gl.num_programs(0)):
        tile, n_tile = tile_of(place, live, num_n, GROUP)
        row = gl.load(tile_start_ptr + tile) + WHICH * HALF
        end = gl.load(end_ptr + gl.load(tile_expert_ptr + tile)).to(gl.int32)
        # Fetched before the product, which hides that one load waits for the other.
        gate = _gate_of(row, end, order_ptr, gate_ptr)
        if LEAD > 0 and WHICH == 1:
            mbarrier.wait(ahead, at // num_k & 1)
        if row < end:
            acc = _multiply_half(ring, ahead, at, num_k, WHICH, True, LEAD * (1 - WHICH))
            left, right = gl.split(acc.reshape(HALF, 2, BN // 2).permute(0, 2, 1))
            first, second = panels_of(left)
            third, fourth = panels_of(right)
            column = n_tile * BN
            share = _differentiate(first, gate, panel, panels, outs, row, end, column, WHICH)
            column += PANEL
            share += _differentiate(second, gate, panel + 1, panels, outs, row, end, column, WHICH)
            column += PANEL
            share += _differentiate(third, gate, panel + 2, panels, outs, row, end, column, WHICH)
            column += PANEL
            share += _differentiate(fourth, gate, panel + 3, panels, outs, row, end, column, WHICH)
            rows = row + gl.arange(0, HALF, gl.SliceLayout(1, accumulator(PANEL)))
            gl.store(share_ptr + n_tile.to(gl.int64) * num_rows + rows, share, mask=rows < end)
            panel += _PANELS
        else:  # no rows, but the ring goes round
            for k in range(num_k):
                mbarrier.wait(full.index((at + k) % STAGES), (at + k) // STAGES & 1)
                mbarrier.arrive(empty.index((at + k) % STAGES))
        at += num_k


@gluon.jit(do_not_specialize=["num_rows", "num_k", "num_n"])
def hidden_together(
    x_desc,
    w_desc,
    h_desc,
    dh_desc,
    a_desc,
    dh_ptr,
    a_ptr,
    share_ptr,
    gate_ptr,
    order_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    end_ptr,
    live_ptr,
    num_rows,
    num_k,
    num_n,
    w_rows,
    F,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    LEAD: gl.constexpr,
):
    """As `hidden_in_turns`. BUFFERS: of h, for each group."""
    x_bufs = buffers(STAGES, x_desc)
    w_bufs = buffers(STAGES, w_desc)
    h_bufs = buffers(4 * BUFFERS, h_desc)
    a_bufs = buffers(2, a_desc)
    full, empty = barriers(STAGES, 1, 2)
    h_full, h_empty = barriers(2 * BUFFERS, 1, 1)
    turns, _ = barriers(1, 1, 1)
    plan = (tile_expert_ptr, tile_start_ptr, end_ptr, live_ptr)
    ring = (x_bufs, w_bufs, full, empty, turns)
    panels = (h_bufs, a_bufs, h_full, h_empty)
    outs = (dh_desc, a_desc, dh_ptr, a_ptr, F)
    gates = (gate_ptr, order_ptr, share_ptr, num_rows)
    fetch = (x_desc, w_desc, ring, plan, num_k, num_n, w_rows)
    work = (ring, panels, outs, gates, plan, num_k, num_n)
    gl.warp_specialize(
        [
            (_halves, (0, work, GROUP, LEAD)),
            (_halves, (1, work, GROUP, LEAD)),
            (fetch_blocks, (fetch, GROUP, True)),
            (_fetch_h, (0, h_desc, panels, plan, num_n, F, GROUP)),
            (_fetch_h, (1, h_desc, panels, plan, num_n, F, GROUP)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
