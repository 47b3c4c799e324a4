"""Products with a head's features on Hopper, in one part or in two.

The matrix units take 16 features at a time, and a tile a power of two of them. Heads of 33 to 48
features are multiplied as 32 and 16: never the last 16 zeros, and fewer sums are held. (H200, the
forward with 44 features: 462 -> 416 us.) Their tiles are fetched as two as well: the 16 zeros would
take the shared memory that weights need on their way out.

q, acc and tiles are tuples of parts. Shapes as in attention_hopper.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from acmoe.ops.attention.hopper.staging import ROWS, SCORE, query_of

FIRST = gl.constexpr(32)  # of two parts
SECOND = gl.constexpr(16)


@gluon.jit
def _part_of_queries(
    q_ptr, i0, L, P: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """WIDTH features of a warpgroup's queries, as a factor in registers."""
    layout: gl.constexpr = gl.DotOperandLayout(0, SCORE, 2)
    m = i0 + query_of(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), GROUP)
    p = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    return gl.load(q_ptr + (m[:, None] * P + p[None, :]), mask=(m < L)[:, None], other=0.0)


@gluon.jit
def queries_of(q_ptr, i0, L, P: gl.constexpr, FEATURES: gl.constexpr, GROUP: gl.constexpr):
    if FEATURES == FIRST + SECOND:
        first = _part_of_queries(q_ptr, i0, L, P, FIRST, GROUP)
        return first, _part_of_queries(q_ptr + FIRST, i0, L, P, SECOND, GROUP)
    else:
        return (_part_of_queries(q_ptr, i0, L, P, FEATURES, GROUP),)


def part_widths(features: int, width: int) -> tuple[int, int]:
    """Features of either part's tiles; all of them where there is only one part."""
    return (32, 16) if 32 < features <= 48 else (width, width)


@gluon.jit
def _rows_at(tiles, at):
    tile = tiles.index(at)
    return tile.reshape([tile.shape[len(tile.shape) - 2], tile.shape[len(tile.shape) - 1]])


@gluon.jit
def tile_at(tiles, WHICH: gl.constexpr, at):
    """Keys (0), values (1) or columns of the table (2) of a stage."""
    first = _rows_at(tiles[0][WHICH], at)
    if len(tiles) == 2:
        return first, _rows_at(tiles[1][WHICH], at)
    else:
        return (first,)


@gluon.jit
def times(q, tile, sums, ADDS: gl.constexpr):
    """Begins q @ tile^T, added to the sums or instead of them."""
    width: gl.constexpr = q[0].shape[1]
    part = tile[0].slice(0, width, 1).permute((1, 0))
    sums = warpgroup_mma(q[0], part, sums, use_acc=ADDS, is_async=True)
    if len(q) == 2:
        sums = warpgroup_mma(q[1], tile[1].permute((1, 0)), sums, is_async=True)
    return sums


@gluon.jit
def _zeros(WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return gl.zeros([ROWS, WIDTH], gl.float32, layout)


@gluon.jit
def nothing_gathered(FEATURES: gl.constexpr):
    """The sums of weighted values, before the first."""
    if FEATURES == FIRST + SECOND:
        return _zeros(FIRST), _zeros(SECOND)
    else:
        return (_zeros(FEATURES),)


@gluon.jit
def _scaled(part, row):
    return part * gl.convert_layout(row, gl.SliceLayout(1, part.type.layout))[:, None]


@gluon.jit
def scaled(acc, row):
    """Each query's sums by a number of its own."""
    if len(acc) == 2:
        return _scaled(acc[0], row), _scaled(acc[1], row)
    else:
        return (_scaled(acc[0], row),)


@gluon.jit
def _plus_values(part, weight, v_tile):
    weight = gl.convert_layout(weight, gl.DotOperandLayout(0, part.type.layout, 2))
    return warpgroup_mma(weight, v_tile, part, is_async=True)


@gluon.jit
def plus_values(acc, weight, v_tile):
    """Begins acc + weight @ values: as many products as there are parts."""
    width: gl.constexpr = acc[0].shape[1]
    first = _plus_values(acc[0], weight, v_tile[0].slice(0, width, 1))
    if len(acc) == 2:
        return first, _plus_values(acc[1], weight, v_tile[1])
    else:
        return (first,)


@gluon.jit
def gathered(acc):
    """The sums when their products are done."""
    if len(acc) == 2:
        return warpgroup_mma_wait(0, deps=acc)
    else:
        return (warpgroup_mma_wait(0, deps=acc),)


@gluon.jit
def _write(part, out_ptr, i0, L, stride, REAL: gl.constexpr, GROUP: gl.constexpr):
    layout: gl.constexpr = part.type.layout
    row = i0 + query_of(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), GROUP)
    p = gl.arange(0, part.shape[1], gl.SliceLayout(0, layout))
    known = (row < L)[:, None] & (p < REAL)[None, :]
    places = row[:, None] * stride + p[None, :]
    gl.store(out_ptr + places, part.to(out_ptr.dtype.element_ty), mask=known)


@gluon.jit
def write(acc, out_ptr, i0, L, stride, REAL: gl.constexpr, GROUP: gl.constexpr):
    """A warpgroup's rows of the output, the REAL features of each."""
    _write(acc[0], out_ptr, i0, L, stride, REAL, GROUP)
    if len(acc) == 2:
        _write(acc[1], out_ptr + FIRST, i0, L, stride, REAL - FIRST, GROUP)
