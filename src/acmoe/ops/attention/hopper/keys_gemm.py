"""Products of the keys' gradients on Hopper: keys down, queries or features across.

As in attention_parts.py heads of 33 to 48 features are multiplied as 32 and 16. Here the parts lie
apart in shared memory, too, which leaves room for a quarter more weights there. v, dk, dv and tiles
are tuples of parts. Shapes as in attention_keys.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from acmoe.ops.attention.hopper.gemm import FIRST, SECOND
from acmoe.ops.attention.hopper.keys_loads import BLOCK

IN_PARTS = gl.constexpr(48)
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def _values(v_ptr, j0, N, stride, WIDTH: gl.constexpr):
    """Values of a tile of keys, as a factor in registers."""
    layout: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    j = j0 + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    p = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    places = j[:, None].to(gl.int64) * stride + p[None, :]
    return gl.load(v_ptr + places, mask=(j < N)[:, None], other=0.0)


@gluon.jit
def values_of(v_ptr, j0, N, stride, FEATURES: gl.constexpr):
    if FEATURES == IN_PARTS:
        first = _values(v_ptr, j0, N, stride, FIRST)
        return first, _values(v_ptr + FIRST, j0, N, stride, SECOND)
    else:
        return (_values(v_ptr, j0, N, stride, FEATURES),)


@gluon.jit
def _rows(tiles, t):
    return tiles.index(t).reshape([BLOCK, tiles.shape[3]])


@gluon.jit
def times_values(v, grad_tiles, t):
    """Begins values @ gradients^T: the gradient of the weights."""
    dweight = gl.zeros([BLOCK, BLOCK], gl.float32, SQUARE)
    grad = _rows(grad_tiles[0], t).permute([1, 0])
    dweight = warpgroup_mma(v[0], grad, dweight, use_acc=False, is_async=True)
    if len(v) == 2:
        grad = _rows(grad_tiles[1], t).permute([1, 0])
        dweight = warpgroup_mma(v[1], grad, dweight, is_async=True)
    return dweight


@gluon.jit
def _plus(acc, factor, rows):
    factor = gl.convert_layout(factor, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(factor, rows, acc, is_async=True)


@gluon.jit
def plus_rows(acc, factor, tiles, t):
    """Begins acc + factor @ rows of a tile of queries."""
    first = _plus(acc[0], factor, _rows(tiles[0], t))
    if len(acc) == 2:
        return first, _plus(acc[1], factor, _rows(tiles[1], t))
    else:
        return (first,)


@gluon.jit
def finished(dk, dv):
    """The sums when their products are done."""
    if len(dk) == 2:
        a, b, c, d = warpgroup_mma_wait(0, deps=[dk[0], dk[1], dv[0], dv[1]])
        return (a, b), (c, d)
    else:
        a, c = warpgroup_mma_wait(0, deps=[dk[0], dv[0]])
        return (a,), (c,)


@gluon.constexpr_function
def _lines(width):
    """Four features a thread, so that a row's four threads write 32 bytes, a sector. Pairs of
    threads swap two numbers for it, which needs no shared memory; eight features would."""
    rest = [[0, 16 << bit] for bit in range((width // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *rest, [8, 0]],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )


@gluon.jit
def _write_part(part, ptr, j0, N, stride, scale):
    layout: gl.constexpr = _lines(part.shape[1])
    rows = gl.convert_layout((part * scale).to(ptr.dtype.element_ty), layout)
    j = j0 + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    p = gl.arange(0, part.shape[1], gl.SliceLayout(0, layout))
    gl.store(ptr + (j[:, None].to(gl.int64) * stride + p[None, :]), rows, mask=(j < N)[:, None])


@gluon.jit
def write(acc, ptr, j0, N, stride, scale):
    """The features of a tile's keys."""
    _write_part(acc[0], ptr, j0, N, stride, scale)
    if len(acc) == 2:
        _write_part(acc[1], ptr + FIRST, j0, N, stride, scale)


def features_in(width: int, features: int) -> int:
    """Those that are multiplied: zeros fill a head up to its width."""
    return IN_PARTS.value if width == 64 and features <= IN_PARTS.value else width


def parts_of(used: int) -> tuple[tuple[int, int], ...]:
    """First feature and number of them."""
    return ((0, 32), (32, 16)) if used == IN_PARTS.value else ((0, used),)
