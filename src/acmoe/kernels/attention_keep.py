"""How the forward on Hopper writes the weights it keeps: see attention_kept.py.

The matrix units leave two keys of every eight in a thread: stores of 4 bytes, 16 bytes of a row at
a time, half a sector of memory. So the threads of a warp first hand them on, through shared memory,
until each has eight keys of a row side by side: stores of 16 bytes, 64 bytes of a row at a time.
This takes half of the rows and half of the keys at once: for more there is no room where two
programs share an SM.

Shapes as in attention_hopper.py, rows, columns and planes as in attention_skew.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from acmoe.kernels.attention_skew import COMB
from acmoe.kernels.attention_strip import KEYS, query_of

PASSED_BYTES = 32 * 32 * 2  # of shared memory that a warpgroup's weights pass through
_HALF = gl.constexpr(32)  # of a tile's keys, and of a warpgroup's rows: bit 3 unset, or set
_EIGHTS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)  # eight keys of a row side by side; a row is in the warp where SCORE has it
_STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0]],
        lane_bases=[[0, 0, 8], [0, 0, 16], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]],
        block_bases=[],
        shape=[32, 2, 32],
    )
)  # half of these rows, and their keys in two halves
_ONE = gl.constexpr(gl.SliceLayout(1, _STORED.value))  # of the two


@gluon.jit
def _row_of(x, i, num_heads_rows, num_rows, pitch):
    """Where the row of query i begins; in eights, so the compiler sees it. 32 bits: the buffer has
    less than 2^31 numbers."""
    return (i % COMB * num_heads_rows + x * num_rows + i // COMB) * (pitch // COMB) * COMB


@gluon.jit
def places_of(keep, x, i0, L, GROUP: gl.constexpr):
    """Where the first 32 keys of a warpgroup's rows with bit 3 unset lie, which of the rows there
    are, and how far before them the others lie: row m + 8 is the query two before that of row m,
    in the same eight of queries and so two planes before."""
    _, _, num_heads_rows, num_rows, pitch, shift = keep
    m = gl.arange(0, _HALF, gl.SliceLayout(1, _ONE))
    i = i0 + query_of(m // 8 * 16 + m % 8, GROUP)
    row = _row_of(x, i, num_heads_rows, num_rows, pitch) + (shift - i // COMB) * COMB
    place = row[:, None] + gl.arange(0, _HALF, gl.SliceLayout(0, _ONE))[None, :]
    return place, (i < L)[:, None], 2 * num_heads_rows * (pitch // COMB) * COMB


@gluon.jit
def keep_weights(kept_ptr, signed, places, j0):
    """A tile's weights, each in its place."""
    place, real, planes = places
    eights = gl.convert_layout(signed, _EIGHTS)
    rows = gl.split(eights.reshape([4, 2, 8, KEYS]).permute([0, 2, 3, 1]))
    keys = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, _STORED))) * _HALF
    for half in gl.static_range(2):
        block = rows[half].reshape([_HALF, 2, _HALF])
        block = gl.convert_layout(block, _STORED, assert_trivial=True)
        ptrs = kept_ptr - half * planes + (place + j0)[:, None, :] + keys[None, :, None]
        gl.store(ptrs, block, mask=real[:, None, :])


@gluon.jit
def keep_base(base_ptr, base, rows, i, j0, L, N):
    """What the weights of a tile are relative to, a number a row."""
    head = base_ptr + rows * gl.cdiv(N, KEYS)
    gl.store(head + (j0 // KEYS * L + i), base, mask=i < L)
