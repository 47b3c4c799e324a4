"""How the forward on Hopper writes the weights it keeps: see attention_kept.py.

The copy engine does it, while the matrix units have products to do: 64 rows of 128 bytes at a time.
In its memory a warpgroup's rows, every second query of 128, are four planes, and in each sixteen
rows one below the other.

Shapes as in attention_hopper.py, rows, columns and planes as in attention_skew.py.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from acmoe.ops.attention.hopper.staging import KEYS, query_of
from acmoe.ops.attention.triton.skew import MARGIN, Band
from acmoe.ops.device.gluon_names import store_tile

STAGED_BYTES = 64 * 64 * 2  # of shared memory that a warpgroup's weights pass through
_HALF = gl.constexpr(32)  # of a warpgroup's rows: bit 3 unset, or set
_QUADS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 4],
    )
)  # the four threads that share a row of one half of SCORE


def first_key(band: Band) -> int:
    """Of the first tile that any query meets."""
    return max(band.keys - band.queries - band.span, 0) // 64 * 64


def kept_tiles(weights: Tensor, band: Band, num: int) -> TensorDescriptor:
    """How the copy engine writes every second query of 128, and 64 keys: parity, head, every second
    plane, eight queries, key from `first_key` on."""
    dtype = gl.bfloat16 if weights.dtype == torch.bfloat16 else gl.float16
    block = [1, 1, 4, 16, 64]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    first = first_key(band)
    plane = num * band.rows * band.pitch
    shape = [2, num, 4, band.rows, (band.keys - first + 63) // 64 * 64]
    strides = [plane, band.rows * band.pitch, 2 * plane, band.pitch - 8, 1]
    base = weights[MARGIN + 8 * band.shift + first :]
    return TensorDescriptor(base, shape, strides, block, layout)


@gluon.jit
def stage_weights(staged, signed):
    """A tile's weights for the copy engine, when it is done with the last. Row m is query
    2 (8 (m % 8) + m // 8) of the group: bits 4 and 3 of m are its plane."""
    rows = signed.reshape([2, 2, 2, 8, KEYS]).permute([1, 2, 3, 0, 4])
    tma.store_wait(0)
    staged.store(rows.reshape([1, 1, 4, 16, KEYS]))
    fence_async_shared()


@gluon.jit
def keep_weights(kept_desc, staged, x, i0, j, GROUP: gl.constexpr):
    """Each into its place; j counts from `first_key`."""
    store_tile(kept_desc, [GROUP, x, 0, i0 // 8, j], staged)


@gluon.jit
def keep_base(base_ptr, base, rows, i0, j0, L, N, GROUP: gl.constexpr):
    """What the weights of a tile are relative to, a number a row: of a row's four threads one
    stores it, and one that of the row eight on, two queries after it."""
    low, high = gl.split(base.reshape([4, 2, 8]).permute([0, 2, 1]))
    own: gl.constexpr = gl.SliceLayout(1, _QUADS)
    low = gl.convert_layout(low.reshape([_HALF]), own, assert_trivial=True)
    high = gl.convert_layout(high.reshape([_HALF]), own, assert_trivial=True)
    m = gl.arange(0, _HALF, own)
    i = i0 + query_of(m // 8 * 16 + m % 8, GROUP)
    quarter = gl.arange(0, 4, gl.SliceLayout(0, _QUADS))[None, :]
    place = j0 // KEYS * L + i[:, None] + 2 * quarter
    both = gl.where(quarter == 0, low[:, None], high[:, None])
    head = base_ptr + rows * gl.cdiv(N, KEYS)
    gl.store(head + place, both, mask=(i < L)[:, None] & (quarter < 2))
