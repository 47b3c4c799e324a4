"""Gluon functions that the Hopper kernels of several ops share: buffers, mbarriers, accumulators.

A warp-specialised kernel has producer warps, which load blocks into the stages of a pipeline in
shared memory, and consumers, warpgroups of four warps, which multiply them by wgmma. Each stage has
two mbarriers: "full" (the block has arrived) and "empty" (the consumers have read it).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

HALF_M = gl.constexpr(64)  # M of one wgmma: rows of half a tile of 128
PANEL = gl.constexpr(64)  # columns of a panel: 128 bytes, the swizzle width of shared memory


@gluon.constexpr_function
def acc_layout(columns):
    """Return the register layout of a wgmma accumulator (64, columns) of one warpgroup."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def make_buffers(NUM_STAGES: gl.constexpr, desc):
    """Allocate shared memory for NUM_STAGES blocks of a TMA descriptor."""
    shape: gl.constexpr = [NUM_STAGES] + desc.block_shape  # noqa: RUF005, Gluon has no unpacking
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def make_barriers(
    NUM_STAGES: gl.constexpr, PRODUCER_ARRIVALS: gl.constexpr, CONSUMER_ARRIVALS: gl.constexpr
):
    """Allocate a full and an empty mbarrier for each stage, with these arrival counts."""
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=PRODUCER_ARRIVALS)
        mbarrier.init(empty.index(i), count=CONSUMER_ARRIVALS)
    return full, empty


@gluon.jit
def wait_ping_pong(ping_pong, local_tile, CONSUMER: gl.constexpr):
    """Wait until the other consumer has issued the MMAs of the program's previous tile.

    (With the barriers of an epilogue: until it has finished that tile's epilogue.) Without this
    order a consumer could run ahead by more than one phase of a stage's mbarrier. A wait sees only
    the parity of a phase, so that it would take the phase before the last for its own.
    """
    mbarrier.wait(ping_pong.index(CONSUMER), (local_tile // 2 & 1) ^ (1 - CONSUMER))


@gluon.jit
def split_panels(half):
    """Split (64, 128) into its left and right 64 columns, without moving data between threads."""
    left, right = gl.split(half.reshape(HALF_M, 2, PANEL).permute(0, 2, 1))
    left = gl.convert_layout(left, acc_layout(PANEL), assert_trivial=True)
    return left, gl.convert_layout(right, acc_layout(PANEL), assert_trivial=True)
