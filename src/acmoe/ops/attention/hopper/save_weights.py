"""Stores of the attention weights that the forward kernel on Hopper saves for backward.

A warpgroup copies its (64, 64) tile of weights, 8 KB, to a shared-memory staging buffer, and TMA
stores it as 64 rows of 128 bytes while the tensor cores run the next GEMMs. The warpgroup's rows
are every second query of 128: in the skewed buffer they belong to four planes, with sixteen
consecutive rows in each. The running row maximum that the weights are relative to is stored
directly, one float32 per query and tile.

The format is described in saved_weights.py, planes, rows and columns in triton/skew.py, shapes in
forward.py.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from acmoe.ops.attention.hopper.staging import KEYS, query_of_row
from acmoe.ops.attention.triton.skew import MARGIN, SkewLayout
from acmoe.ops.device.gluon_names import store_tile
from acmoe.ops.device.tma import swizzled

STAGING_BYTES = 64 * 64 * 2  # shared memory of one warpgroup's weight tile
_HALF_ROWS = gl.constexpr(32)  # rows of a warpgroup with bit 3 unset, or set
_QUAD_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 4],
    )
)  # the four threads that share a row, for one half of SCORE's rows


def first_saved_key(skew: SkewLayout) -> int:
    """Return the first key of the first tile that any query visits."""
    return max(skew.keys - skew.queries - skew.span, 0) // 64 * 64


def store_descriptor(weights: Tensor, skew: SkewLayout, num: int) -> TensorDescriptor:
    """Return a TMA descriptor for tiles of every second of 128 queries, and 64 keys.

    Its dimensions are the query's parity, head, plane // 2, row (eight queries), and key from
    `first_saved_key` on.
    """
    block = [1, 1, 4, 16, 64]
    first = first_saved_key(skew)
    plane = num * skew.rows * skew.pitch
    shape = [2, num, 4, skew.rows, (skew.keys - first + 63) // 64 * 64]
    strides = [plane, skew.rows * skew.pitch, 2 * plane, skew.pitch - 8, 1]
    base = weights[MARGIN + 8 * skew.key0_block + first :]
    return TensorDescriptor(base, shape, strides, block, swizzled(*block, dtype=weights.dtype))


@gluon.jit
def stage_weights(staging, signed):
    """Copy a tile's signed weights to the staging buffer, after TMA has read the previous tile.

    Row m is query 2 * (8 * (m % 8) + m // 8) of the program, plus the warpgroup's index: bits 4 and
    3 of m select its plane.
    """
    rows = signed.reshape([2, 2, 2, 8, KEYS]).permute([1, 2, 3, 0, 4])
    tma.store_wait(0)
    staging.store(rows.reshape([1, 1, 4, 16, KEYS]))
    fence_async_shared()


@gluon.jit
def store_weights(saved_desc, staging, x, i0, j, GROUP: gl.constexpr):
    """Issue the TMA store of the staged tile; j counts from `first_saved_key`."""
    store_tile(saved_desc, [GROUP, x, 0, i0 // 8, j], staging)


@gluon.jit
def store_running_max(max_ptr, max_log2, rows, i0, j0, L, N, GROUP: gl.constexpr):
    """Store the scaled running row maximum of a tile, one element per row.

    Four threads share a row. One stores the element of the row, another that of the row eight
    further, which is the next query of the warpgroup, two queries later.
    """
    low, high = gl.split(max_log2.reshape([4, 2, 8]).permute([0, 2, 1]))
    layout: gl.constexpr = gl.SliceLayout(1, _QUAD_LAYOUT)
    low = gl.convert_layout(low.reshape([_HALF_ROWS]), layout, assert_trivial=True)
    high = gl.convert_layout(high.reshape([_HALF_ROWS]), layout, assert_trivial=True)
    m = gl.arange(0, _HALF_ROWS, layout)
    i = i0 + query_of_row(m // 8 * 16 + m % 8, GROUP)
    thread = gl.arange(0, 4, gl.SliceLayout(0, _QUAD_LAYOUT))[None, :]
    offsets = j0 // KEYS * L + i[:, None] + 2 * thread
    both = gl.where(thread == 0, low[:, None], high[:, None])
    head_ptr = max_ptr + rows * gl.cdiv(N, KEYS)
    gl.store(head_ptr + offsets, both, mask=(i < L)[:, None] & (thread < 2))
