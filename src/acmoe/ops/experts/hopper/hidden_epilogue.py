"""Epilogue of the GEMM "hidden" (hidden.py): from da to the gradients before the activation.

From da (N, F), which a consumer has in registers, it computes, as `activation_kernel` does:
    dh (N, 2F) = gate * da * act'(h)
    gate * a (N, F), where a = act(h)
    dgate_partial (tiles of columns, N) = da * a, summed over the columns of a tile

It goes through panels of (64, 64). A producer loads gate and up of each panel of h into shared
memory; the results overwrite them there, and are stored by TMA.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from acmoe.ops.device.gluon_blocks import (
    HALF_M,
    PANEL,
    acc_layout,
    make_barriers,
    make_buffers,
    split_panels,
)
from acmoe.ops.device.gluon_names import load_tile, store_tile, thread_barrier
from acmoe.ops.experts.hopper.pipeline import store_masked
from acmoe.ops.experts.triton.activation import activate


@gluon.jit
def make_panels(BUFFERS: gl.constexpr, h_desc, a_desc):
    """Allocate shared memory for so many panels of h, and for one of gate * a.

    A consumer has read its panel of gate * a before anybody writes the next one.
    """
    full, empty = make_barriers(BUFFERS, 1, 1)
    return make_buffers(2 * BUFFERS, h_desc), make_buffers(1, a_desc).index(0), full, empty


@gluon.jit
def load_panel(h_desc, panels, number, row, column, F):
    """Producer: load gate and up of the next panel, which is the number-th of these buffers."""
    h_bufs, _, full, empty = panels
    BUFFERS: gl.constexpr = full.shape[0]
    stage = number % BUFFERS
    full_bar = full.index(stage)
    mbarrier.wait(empty.index(stage), (number // BUFFERS & 1) ^ 1)
    mbarrier.expect(full_bar, 2 * h_desc.block_type.nbytes)
    load_tile(h_desc, [row, column], full_bar, h_bufs.index(2 * stage))
    load_tile(h_desc, [row, F + column], full_bar, h_bufs.index(2 * stage + 1))


@gluon.jit
def load_gate(row, end, permutation_ptr, gate_ptr):
    """Return the gates (64,) of the rows from `row` on as float32, 0 from `end` on."""
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, acc_layout(PANEL)))
    row_mask = rows < end
    choice = gl.load(permutation_ptr + rows, mask=row_mask, other=0)
    return gl.load(gate_ptr + choice, mask=row_mask, other=0.0).to(gl.float32)


@gluon.jit
def _panel_backward(da, gate, number, panels, results, row, end, column):
    """Compute and store dh and gate * a of a panel; return row sums of da * a.

    A panel that begins at column F or later, in the last tile where F is no multiple of a tile's
    columns, stores nothing, and its sums are zeros: dh may alias h, where other columns lie there.
    """
    h_bufs, a_buf, full, empty = panels
    dh_desc, a_desc, dh_ptr, a_ptr, F = results
    BUFFERS: gl.constexpr = full.shape[0]
    dtype: gl.constexpr = a_buf.dtype
    stage = number % BUFFERS
    mbarrier.wait(full.index(stage), number // BUFFERS & 1)
    h_buf, u_buf = h_bufs.index(2 * stage), h_bufs.index(2 * stage + 1)
    h = h_buf.load(acc_layout(PANEL)).to(gl.float32)
    u = u_buf.load(acc_layout(PANEL)).to(gl.float32)
    a, slope, slope_u = activate(h, u, "swiglu")
    dgate = gl.where(column < F, gl.sum(da * a, axis=1), 0.0)
    gate = gate[:, None]
    d = da * gate
    h_buf.store((d * slope).to(dtype))
    u_buf.store((d * slope_u).to(dtype))
    a_buf.store((a * gate).to(dtype))
    fence_async_shared()
    if column < F:
        if row + HALF_M <= end:
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
    mbarrier.arrive(empty.index(stage))
    return dgate


@gluon.jit
def two_panels_backward(da, gate, number, panels, results, row, end, column):
    """Handle the panels `number` and `number` + 1, next to each other; return sums over both."""
    left, right = split_panels(da)
    dgate = _panel_backward(left, gate, number, panels, results, row, end, column)
    return dgate + _panel_backward(
        right, gate, number + 1, panels, results, row, end, column + PANEL
    )


@gluon.jit
def store_gate_sums(dgate, dgate_partial_ptr, row, end):
    """Store the sums (64,) of da * a over the columns of a tile."""
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, acc_layout(PANEL)))
    gl.store(dgate_partial_ptr + rows, dgate, mask=rows < end)
