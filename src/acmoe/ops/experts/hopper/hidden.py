"""Grouped GEMM da = x @ down[e] with the backward of SwiGLU fused into its epilogue.

x (N, D) holds the gradient by the experts' output in sorted rows, down is (E, D, F), and h (N, 2F)
holds the saved gate and up projections. From da (N, F) the epilogue computes, as
`activation_kernel` does:
    dh (N, 2F) = gate * da * act'(h)
    gate * a (N, F), where a = act(h)
    dgate_partial (ceil(F / 128), N) = da * a, summed over the columns of a tile

Ping-pong schedule (pipeline.py) over (128, 128) tiles, with two producer warps: one loads x and
down, the other h, in panels of (64, 64). da stays in registers, and the results are stored by TMA
from the shared-memory buffers that h was loaded into. Compared with GEMM and activation as two
kernels, da is neither written to memory nor read back, and the pass over h overlaps the MMAs
(H200): 1.88 against 2.49 ms at olmoe, 1.44 against 1.83 at qwen30b, 3.30 against 3.76 at mixtral.
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
    wait_ping_pong,
)
from acmoe.ops.device.gluon_names import load_tile, store_tile, thread_barrier
from acmoe.ops.experts.hopper.pipeline import load_blocks, mma_tile, store_masked, tile_of_rows
from acmoe.ops.experts.triton.activation import activate


@gluon.jit
def _load_h(
    h_desc, h_bufs, full, empty, plan, num_n, F, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr
):
    """Producer: load the four panels of h, gate and up, of every tile of the program."""
    BUFFERS: gl.constexpr = h_bufs.shape[0] // 2
    num_used = gl.load(plan[3])
    panel_count = 0
    for tile_id in range(gl.program_id(0), num_used * num_n, gl.num_programs(0)):
        _expert, row, _end, n_tile = tile_of_rows(
            tile_id, plan, num_used, num_n, GROUP_M, BY_EXPERT
        )
        for panel in range(4):
            stage = panel_count % BUFFERS
            full_bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (panel_count // BUFFERS & 1) ^ 1)
            mbarrier.expect(full_bar, 2 * h_desc.block_type.nbytes)
            first = row + panel // 2 * HALF_M
            column = n_tile * 2 * PANEL + panel % 2 * PANEL
            load_tile(h_desc, [first, column], full_bar, h_bufs.index(2 * stage))
            load_tile(h_desc, [first, F + column], full_bar, h_bufs.index(2 * stage + 1))
            panel_count += 1


@gluon.jit
def _load_gate(row, end, permutation_ptr, gate_ptr):
    """Return the gates (64,) of the rows from `row` on as float32, 0 from `end` on."""
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, acc_layout(PANEL)))
    row_mask = rows < end
    choice = gl.load(permutation_ptr + rows, mask=row_mask, other=0)
    return gl.load(gate_ptr + choice, mask=row_mask, other=0.0).to(gl.float32)


@gluon.jit
def _panel_backward(da, gate, panel, epilogue_args, row, end, column):
    """Compute and store dh and gate * a of the panel number `panel`; return row sums of da * a.

    A panel that begins at column F, the second one of the last tile where F is no multiple of 128,
    stores nothing, and its sums are zeros: dh may alias h, where other columns lie there.
    """
    h_bufs, a_bufs, full, empty, dh_desc, a_desc, dh_ptr, a_ptr, F = epilogue_args
    BUFFERS: gl.constexpr = a_bufs.shape[0]
    dtype: gl.constexpr = a_bufs.dtype
    stage = panel % BUFFERS
    mbarrier.wait(full.index(stage), panel // BUFFERS & 1)
    h_buf, u_buf, a_buf = h_bufs.index(2 * stage), h_bufs.index(2 * stage + 1), a_bufs.index(stage)
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
def _half_backward(da, gate, panel, epilogue_args, dgate_partial_ptr, row, end, column):
    """Handle the two panels of half a tile, and store the sums of da * a over their columns."""
    left, right = split_panels(da)
    dgate = _panel_backward(left, gate, panel, epilogue_args, row, end, column)
    dgate += _panel_backward(right, gate, panel + 1, epilogue_args, row, end, column + PANEL)
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, acc_layout(PANEL)))
    gl.store(dgate_partial_ptr + rows, dgate, mask=rows < end)


@gluon.jit
def _ping_pong_consumer(
    CONSUMER: gl.constexpr, consumer_args, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr
):
    """Consumer: compute every second tile of the program, by a GEMM and its epilogue."""
    pipeline, epilogue_args, epilogue_ping_pong, gate_args, plan, num_k, num_n = consumer_args
    gate_ptr, permutation_ptr, dgate_partial_ptr, num_rows = gate_args
    num_used = gl.load(plan[3])
    programs = gl.num_programs(0)
    local_tile = CONSUMER
    for tile_id in range(gl.program_id(0) + CONSUMER * programs, num_used * num_n, 2 * programs):
        _expert, row, end, n_tile = tile_of_rows(tile_id, plan, num_used, num_n, GROUP_M, BY_EXPERT)
        # Loaded before the GEMM, which hides the latency of these two dependent loads.
        gate = _load_gate(row, end, permutation_ptr, gate_ptr)
        lower_gate = _load_gate(row + HALF_M, end, permutation_ptr, gate_ptr)
        upper, lower = mma_tile(pipeline, local_tile, end - row, num_k, CONSUMER, True)
        wait_ping_pong(epilogue_ping_pong, local_tile, CONSUMER)
        dgate_ptr = dgate_partial_ptr + n_tile.to(gl.int64) * num_rows
        panel = 4 * local_tile
        column = n_tile * 2 * PANEL
        _half_backward(upper, gate, panel, epilogue_args, dgate_ptr, row, end, column)
        _half_backward(
            lower, lower_gate, panel + 2, epilogue_args, dgate_ptr, row + HALF_M, end, column
        )
        mbarrier.arrive(epilogue_ping_pong.index(1 - CONSUMER))
        local_tile += 2


@gluon.jit(do_not_specialize=["num_rows", "num_k", "num_n"])
def hidden_gradient_kernel(
    x_desc,
    w_desc,
    h_desc,
    dh_desc,
    a_desc,
    dh_ptr,
    a_ptr,
    dgate_partial_ptr,
    gate_ptr,
    permutation_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    offsets_ptr,
    num_used_ptr,
    num_rows,
    num_k,
    num_n,
    w_rows,
    F,
    GROUP_M: gl.constexpr,
    BY_EXPERT: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """Compute dh (N, 2F), gate * a (N, F) and dgate_partial (B, N) from x (N, D), down and h.

    dh may alias h: each panel is written by the consumer that has read it. BUFFERS: the number of
    panels in flight, whose h is being loaded or whose results are being stored.
    """
    x_bufs = make_buffers(STAGES, x_desc)
    w_bufs = make_buffers(STAGES, w_desc)
    h_bufs = make_buffers(2 * BUFFERS, h_desc)
    a_bufs = make_buffers(BUFFERS, a_desc)
    full, empty = make_barriers(STAGES, 1, 1)
    h_full, h_empty = make_barriers(BUFFERS, 1, 1)
    ping_pong, epilogue_ping_pong = make_barriers(2, 1, 1)
    plan = (tile_expert_ptr, tile_start_ptr, offsets_ptr, num_used_ptr)
    pipeline = (x_bufs, w_bufs, full, empty, ping_pong)
    epilogue_args = (h_bufs, a_bufs, h_full, h_empty, dh_desc, a_desc, dh_ptr, a_ptr, F)
    gate_args = (gate_ptr, permutation_ptr, dgate_partial_ptr, num_rows)
    load_args = (x_desc, w_desc, pipeline, plan, num_k, num_n, w_rows, F)
    consumer_args = (pipeline, epilogue_args, epilogue_ping_pong, gate_args, plan, num_k, num_n)
    gl.warp_specialize(
        [
            (_ping_pong_consumer, (0, consumer_args, GROUP_M, BY_EXPERT)),
            (_ping_pong_consumer, (1, consumer_args, GROUP_M, BY_EXPERT)),
            (load_blocks, (load_args, GROUP_M, BY_EXPERT, True)),
            (_load_h, (h_desc, h_bufs, h_full, h_empty, plan, num_n, F, GROUP_M, BY_EXPERT)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
