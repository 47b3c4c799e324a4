"""Grouped GEMM da = x @ down[e] with the backward of SwiGLU fused into its epilogue.

x (N, D) holds the gradient by the experts' output in sorted rows, down is (E, D, F), and h (N, 2F)
holds the saved gate and up projections. hidden_epilogue.py computes the results from da (N, F),
which stays in registers. Compared with GEMM and activation as two kernels, da is neither written to
memory nor read back (H200, ping-pong): 1.88 against 2.49 ms at olmoe, 1.44 against 1.83 at qwen30b,
3.30 against 3.76 at mixtral.

The warps are those of pipeline.py and a second producer, which loads h. There are two schedules:
    ping-pong     each consumer computes a (128, 128) tile of its own; the epilogue of one overlaps
                  the MMAs of the other
    cooperative   each consumer computes 64 rows of a (128, 256) tile. For each multiply-add it
                  reads fewer bytes of shared memory, which limits the ping-pong form, but nothing
                  multiplies during an epilogue: it is faster where D is large, so that the MMAs of
                  a tile take long. Programs take their tiles in dynamic order (next_tile.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from acmoe.ops.device.gluon_blocks import (
    HALF_M,
    PANEL,
    make_barriers,
    make_buffers,
    wait_ping_pong,
)
from acmoe.ops.experts.hopper.hidden_epilogue import (
    load_gate,
    load_panel,
    make_panels,
    store_gate_sums,
    two_panels_backward,
)
from acmoe.ops.experts.hopper.next_tile import (
    dispatch_tiles,
    make_mailbox,
    next_tile,
    want_tile,
)
from acmoe.ops.experts.hopper.pipeline import (
    load_blocks,
    load_next_blocks,
    mma_tile,
    place_of_tile,
    skip_blocks,
    tile_of_rows,
)
from acmoe.ops.experts.hopper.rows import finish_half, mma_half


@gluon.jit
def _load_h(h_desc, panels, plan, num_n, F, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr):
    """Producer for ping-pong: load the four panels of h of every tile of the program."""
    num_used = gl.load(plan[3])
    number = 0
    for tile_id in range(gl.program_id(0), num_used * num_n, gl.num_programs(0)):
        _expert, row, _end, n_tile = tile_of_rows(
            tile_id, plan, num_used, num_n, GROUP_M, BY_EXPERT
        )
        for panel in range(4):
            column = (2 * n_tile + panel % 2) * PANEL
            load_panel(h_desc, panels, number, row + panel // 2 * HALF_M, column, F)
            number += 1


@gluon.jit
def _load_halves_of_h(h_args, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr):
    """Producer for the cooperative form: load four panels of h for each half that has rows."""
    h_desc, upper, lower, mailbox, plan, num_n, F = h_args
    num_used = gl.load(plan[3])
    tile_id, local_tile, number_upper, number_lower = gl.program_id(0), 0, 0, 0
    while tile_id < num_used * num_n:
        want_tile(mailbox)
        _expert, row, end, n_tile = tile_of_rows(tile_id, plan, num_used, num_n, GROUP_M, BY_EXPERT)
        for panel in range(4):
            column = (4 * n_tile + panel) * PANEL
            load_panel(h_desc, upper, number_upper, row, column, F)
            number_upper += 1
            if row + HALF_M < end:
                load_panel(h_desc, lower, number_lower, row + HALF_M, column, F)
                number_lower += 1
        tile_id = next_tile(mailbox, local_tile)
        local_tile += 1


@gluon.jit
def _ping_pong_consumer(
    CONSUMER: gl.constexpr, ping_pong_args, GROUP_M: gl.constexpr, BY_EXPERT: gl.constexpr
):
    """Ping-pong consumer: compute every second tile of the program, by a GEMM and its epilogue."""
    consumer_args, panels, epilogue_ping_pong = ping_pong_args
    pipeline, results, gate_args, plan, num_k, num_n = consumer_args
    gate_ptr, permutation_ptr, dgate_partial_ptr, num_rows = gate_args
    num_used = gl.load(plan[3])
    programs = gl.num_programs(0)
    local_tile = CONSUMER
    for tile_id in range(gl.program_id(0) + CONSUMER * programs, num_used * num_n, 2 * programs):
        _expert, row, end, n_tile = tile_of_rows(tile_id, plan, num_used, num_n, GROUP_M, BY_EXPERT)
        below = row + HALF_M
        # Loaded before the GEMM, which hides the latency of these two dependent loads.
        gate = load_gate(row, end, permutation_ptr, gate_ptr)
        lower_gate = load_gate(below, end, permutation_ptr, gate_ptr)
        upper, lower = mma_tile(pipeline, local_tile, end - row, num_k, CONSUMER, True)
        wait_ping_pong(epilogue_ping_pong, local_tile, CONSUMER)
        sums_ptr = dgate_partial_ptr + n_tile.to(gl.int64) * num_rows
        panel, column = 4 * local_tile, n_tile * 2 * PANEL
        dgate = two_panels_backward(upper, gate, panel, panels, results, row, end, column)
        store_gate_sums(dgate, sums_ptr, row, end)
        dgate = two_panels_backward(
            lower, lower_gate, panel + 2, panels, results, below, end, column
        )
        store_gate_sums(dgate, sums_ptr, below, end)
        mbarrier.arrive(epilogue_ping_pong.index(1 - CONSUMER))
        local_tile += 2


@gluon.jit
def _cooperative_consumer(
    CONSUMER: gl.constexpr, consumer_args, panels, mailbox, GROUP_M: gl.constexpr,
    BY_EXPERT: gl.constexpr,
):  # fmt: skip
    """Cooperative consumer: compute the upper or lower half of every tile, and its epilogue.

    It looks up its next tile while the last MMAs of a tile run.
    """
    pipeline, results, gate_args, plan, num_k, num_n = consumer_args
    gate_ptr, permutation_ptr, dgate_partial_ptr, num_rows = gate_args
    num_tiles = gl.load(plan[3]) * num_n
    tile_id, local_tile, k_block, panel = gl.program_id(0), 0, 0, 0
    next_row, next_end, next_n = place_of_tile(tile_id, plan, num_n, GROUP_M, BY_EXPERT)
    while tile_id < num_tiles:
        want_tile(mailbox)
        row, end, n_tile = next_row + CONSUMER * HALF_M, next_end, next_n
        if row < end:
            gate = load_gate(row, end, permutation_ptr, gate_ptr)
            acc = mma_half(pipeline, k_block, num_k, CONSUMER, None, None, True)
            tile_id = next_tile(mailbox, local_tile)
            next_row, next_end, next_n = place_of_tile(tile_id, plan, num_n, GROUP_M, BY_EXPERT)
            left, right = finish_half(pipeline, k_block + num_k, acc)
            column = n_tile * 4 * PANEL
            dgate = two_panels_backward(left, gate, panel, panels, results, row, end, column)
            dgate += two_panels_backward(
                right, gate, panel + 2, panels, results, row, end, column + 2 * PANEL
            )
            sums_ptr = dgate_partial_ptr + n_tile.to(gl.int64) * num_rows
            store_gate_sums(dgate, sums_ptr, row, end)
            panel += 4
        else:
            skip_blocks(pipeline, k_block, num_k)
            tile_id = next_tile(mailbox, local_tile)
            next_row, next_end, next_n = place_of_tile(tile_id, plan, num_n, GROUP_M, BY_EXPERT)
        k_block += num_k
        local_tile += 1


@gluon.jit(do_not_specialize=["num_rows", "num_k", "num_n", "asks_at"])
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
    counter_ptr,
    num_rows,
    num_k,
    num_n,
    asks_at,
    w_rows,
    F,
    GROUP_M: gl.constexpr,
    BY_EXPERT: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    COOPERATIVE: gl.constexpr,
):
    """Compute dh (N, 2F), gate * a (N, F) and dgate_partial (B, N) from x (N, D), down and h.

    dh may alias h: each panel is written by the consumer that has read it. BUFFERS: the number of
    panels in flight, whose h is being loaded or whose results are being stored; if COOPERATIVE, of
    each consumer. counter, asks_at: as in up.py if COOPERATIVE, else None.
    """
    x_bufs = make_buffers(STAGES, x_desc)
    w_bufs = make_buffers(STAGES, w_desc)
    full, empty = make_barriers(STAGES, 1, 2 if COOPERATIVE else 1)
    ping_pong, epilogue_ping_pong = make_barriers(2, 1, 1)  # for COOPERATIVE unused
    panels = make_panels(BUFFERS, h_desc, a_desc)
    plan = (tile_expert_ptr, tile_start_ptr, offsets_ptr, num_used_ptr)
    pipeline = (x_bufs, w_bufs, full, empty, ping_pong)
    results = (dh_desc, a_desc, dh_ptr, a_ptr, F)
    gate_args = (gate_ptr, permutation_ptr, dgate_partial_ptr, num_rows)
    load_args = (x_desc, w_desc, pipeline, plan, num_k, num_n, w_rows, F)
    consumer_args = (pipeline, results, gate_args, plan, num_k, num_n)
    if COOPERATIVE:
        mailbox = make_mailbox(4)
        lower = make_panels(BUFFERS, h_desc, a_desc)
        h_args = (h_desc, panels, lower, mailbox, plan, num_n, F)
        gl.warp_specialize(
            [
                (_cooperative_consumer, (0, consumer_args, panels, mailbox, GROUP_M, BY_EXPERT)),
                (_cooperative_consumer, (1, consumer_args, lower, mailbox, GROUP_M, BY_EXPERT)),
                (load_next_blocks, (load_args, mailbox, asks_at, GROUP_M, BY_EXPERT, True)),
                (_load_halves_of_h, (h_args, GROUP_M, BY_EXPERT)),
                (dispatch_tiles, (mailbox, num_used_ptr, num_n, counter_ptr)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )
    else:
        ping_pong_args = (consumer_args, panels, epilogue_ping_pong)
        gl.warp_specialize(
            [
                (_ping_pong_consumer, (0, ping_pong_args, GROUP_M, BY_EXPERT)),
                (_ping_pong_consumer, (1, ping_pong_args, GROUP_M, BY_EXPERT)),
                (load_blocks, (load_args, GROUP_M, BY_EXPERT, True)),
                (_load_h, (h_desc, panels, plan, num_n, F, GROUP_M, BY_EXPERT)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
