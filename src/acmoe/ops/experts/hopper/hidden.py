"""The gradient by the hidden units in turns (ring.py), and behind it the activation's backward.

The gradient stays in registers; h is fetched, panel by panel, by a warp of its own, and what is
computed of it leaves from the same buffers. One pass over h less, and the other one beside the
products (H200, against product and activation apart): 1.88 for 2.49 ms at olmoe, 1.44 for 1.83 at
qwen30b, 3.30 for 3.76 at mixtral. The mathematics: `activation_kernel`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from acmoe.ops.device.gluon_names import load_tile, store_tile, thread_barrier
from acmoe.ops.experts.hopper.pipeline import (
    HALF,
    PANEL,
    accumulator,
    await_turn,
    barriers,
    buffers,
    fetch_blocks,
    multiply,
    panels_of,
    store_masked,
)
from acmoe.ops.experts.triton.activation import activate
from acmoe.ops.experts.triton.tiles import tile_of


@gluon.jit
def _fetch_h(h_desc, h_bufs, full, empty, plan, num_n, F, GROUP: gl.constexpr):
    """Gate and up of the four panels of every tile."""
    _, tile_start_ptr, _, live_ptr = plan
    BUFFERS: gl.constexpr = h_bufs.shape[0] // 2
    live = gl.load(live_ptr)
    at = 0
    for place in range(gl.program_id(0), live * num_n, gl.num_programs(0)):
        tile, n_tile = tile_of(place, live, num_n, GROUP)
        row = gl.load(tile_start_ptr + tile)
        for panel in range(4):
            slot = at % BUFFERS
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), (at // BUFFERS & 1) ^ 1)
            mbarrier.expect(ready, 2 * h_desc.block_type.nbytes)
            first = row + panel // 2 * HALF
            column = n_tile * 2 * PANEL + panel % 2 * PANEL
            load_tile(h_desc, [first, column], ready, h_bufs.index(2 * slot))
            load_tile(h_desc, [first, F + column], ready, h_bufs.index(2 * slot + 1))
            at += 1


@gluon.jit
def _gate_of(row, end, order_ptr, gate_ptr):
    rows = row + gl.arange(0, HALF, gl.SliceLayout(1, accumulator(PANEL)))
    inside = rows < end
    place = gl.load(order_ptr + rows, mask=inside, other=0)
    return gl.load(gate_ptr + place, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def _differentiate(da, gate, at, panels, row, end, column):
    """dh and gate * a of a panel, the at-th; sums of da * a by rows."""
    h_bufs, a_bufs, full, empty, dh_desc, a_desc, dh_ptr, a_ptr, F = panels
    BUFFERS: gl.constexpr = a_bufs.shape[0]
    dtype: gl.constexpr = a_bufs.dtype
    slot = at % BUFFERS
    mbarrier.wait(full.index(slot), at // BUFFERS & 1)
    h_buf, u_buf, a_buf = h_bufs.index(2 * slot), h_bufs.index(2 * slot + 1), a_bufs.index(slot)
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
        store_tile(dh_desc, [row, column], h_buf)
        store_tile(dh_desc, [row, F + column], u_buf)
        store_tile(a_desc, [row, column], a_buf)
        tma.store_wait(0)
    else:
        store_masked(h_buf, dh_ptr, row, end, column, 2 * F)
        store_masked(u_buf, dh_ptr, row, end, column + F, 2 * F)
        store_masked(a_buf, a_ptr, row, end, column, F)
        fence_async_shared()
    thread_barrier()
    mbarrier.arrive(empty.index(slot))
    return share


@gluon.jit
def _differentiate_half(da, gate, at, panels, share_ptr, row, end, column):
    """Two panels, and the rows' shares of the gate's gradient."""
    left, right = panels_of(da)
    share = _differentiate(left, gate, at, panels, row, end, column)
    share += _differentiate(right, gate, at + 1, panels, row, end, column + PANEL)
    rows = row + gl.arange(0, HALF, gl.SliceLayout(1, accumulator(PANEL)))
    gl.store(share_ptr + rows, share, mask=rows < end)


@gluon.jit
def _turns(WHICH: gl.constexpr, work, GROUP: gl.constexpr):
    """Every second tile of the program: multiplied, differentiated, stored."""
    ring, panels, store_turns, gates, plan, num_k, num_n = work
    tile_expert_ptr, tile_start_ptr, end_ptr, live_ptr = plan
    gate_ptr, order_ptr, share_ptr, num_rows = gates
    live = gl.load(live_ptr)
    programs = gl.num_programs(0)
    turn = WHICH
    for place in range(gl.program_id(0) + WHICH * programs, live * num_n, 2 * programs):
        tile, n_tile = tile_of(place, live, num_n, GROUP)
        row = gl.load(tile_start_ptr + tile)
        end = gl.load(end_ptr + gl.load(tile_expert_ptr + tile)).to(gl.int32)
        # Fetched before the product, which hides that one load waits for the other.
        gate = _gate_of(row, end, order_ptr, gate_ptr)
        lower_gate = _gate_of(row + HALF, end, order_ptr, gate_ptr)
        upper, lower = multiply(ring, turn, end - row, num_k, WHICH, True)
        await_turn(store_turns, turn, WHICH)
        shares = share_ptr + n_tile.to(gl.int64) * num_rows
        at = 4 * turn
        column = n_tile * 2 * PANEL
        _differentiate_half(upper, gate, at, panels, shares, row, end, column)
        _differentiate_half(lower, lower_gate, at + 2, panels, shares, row + HALF, end, column)
        mbarrier.arrive(store_turns.index(1 - WHICH))
        turn += 2


@gluon.jit(do_not_specialize=["num_rows", "num_k", "num_n"])
def hidden_in_turns(
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
):
    """From x (N, D), the gradient by y, to dh (N, 2F) and gate * a (N, F); share (B, N).

    dh may be h: a panel is written by who has read it. BUFFERS: panels whose h is fetched, or whose
    results are stored, at a time.
    """
    x_bufs = buffers(STAGES, x_desc)
    w_bufs = buffers(STAGES, w_desc)
    h_bufs = buffers(2 * BUFFERS, h_desc)
    a_bufs = buffers(BUFFERS, a_desc)
    full, empty = barriers(STAGES, 1, 1)
    h_full, h_empty = barriers(BUFFERS, 1, 1)
    turns, store_turns = barriers(2, 1, 1)
    plan = (tile_expert_ptr, tile_start_ptr, end_ptr, live_ptr)
    ring = (x_bufs, w_bufs, full, empty, turns)
    panels = (h_bufs, a_bufs, h_full, h_empty, dh_desc, a_desc, dh_ptr, a_ptr, F)
    gates = (gate_ptr, order_ptr, share_ptr, num_rows)
    fetch = (x_desc, w_desc, ring, plan, num_k, num_n, w_rows)
    work = (ring, panels, store_turns, gates, plan, num_k, num_n)
    gl.warp_specialize(
        [
            (_turns, (0, work, GROUP)),
            (_turns, (1, work, GROUP)),
            (fetch_blocks, (fetch, GROUP, True)),
            (_fetch_h, (h_desc, h_bufs, h_full, h_empty, plan, num_n, F, GROUP)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
