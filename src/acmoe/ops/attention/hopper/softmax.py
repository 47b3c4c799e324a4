"""The softmax of a warpgroup's 64 queries on Hopper, a tile of keys at a time, in powers of two.

Shapes and names as in attention_hopper.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from acmoe.ops.attention.hopper.staging import KEYS, ROWS, SCORE, query_of

_OWN = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)  # a number a thread and row of SCORE


@gluon.jit
def nothing_summed():
    """Of every row, in the four threads that share it."""
    return gl.zeros([ROWS, 4], gl.float32, _OWN)


@gluon.jit
def _own_sums(weight):
    """Each row's in the four threads that share it: they meet at the end."""
    sums = gl.sum(gl.sum(weight.reshape([ROWS, 8, 4, 2]), axis=3), axis=1)
    return gl.convert_layout(sums, _OWN, assert_trivial=True)


@gluon.jit
def shares(score, peak, total, steep):
    """Softmax goes on by a tile: its weights, what they are relative to, by what those before it
    shrink, and the sums."""
    higher = gl.maximum(peak, gl.max(score, axis=1))
    base = gl.where(higher > float("-inf"), higher, 0.0) * steep  # nothing seen yet
    weight = gl.exp2(score * steep - base[:, None])
    shrink = gl.exp2(peak * steep - base)
    own = gl.convert_layout(shrink, gl.SliceLayout(1, _OWN), assert_trivial=True)
    return weight, base, shrink, higher, total * own[:, None] + _own_sums(weight)


@gluon.jit
def write_sums(peak, total, lse_ptr, i0, L, steep, KEPT: gl.constexpr, GROUP: gl.constexpr):
    """The log2 of a warpgroup's rows' sums; returns by what to multiply the rows."""
    total = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, SCORE), assert_trivial=True)
    empty = total == 0.0
    share = gl.where(empty, 0.0, 1.0 / KEPT) / gl.where(empty, 1.0, total)
    lse = gl.where(empty, 0.0, peak * steep + gl.log2(gl.where(empty, 1.0, total)))
    i = i0 + query_of(gl.arange(0, ROWS, gl.SliceLayout(1, SCORE)), GROUP)
    gl.store(lse_ptr + i, lse, mask=i < L)
    return share


@gluon.jit
def in_sight(score, before, j0, inner, outer, span, seen_ptr, N, HAS_MASK: gl.constexpr):
    """Minus infinity where a query does not see a key. From `inner` to `outer` all are in all
    windows."""
    n = gl.arange(0, KEYS, gl.SliceLayout(0, SCORE))
    if (j0 < inner) | (j0 > outer):
        distance = before[:, None] - (j0 + n)[None, :]
        score = gl.where(distance.to(gl.uint32, bitcast=True) < span, score, float("-inf"))
    if HAS_MASK:
        seen = gl.load(seen_ptr + j0 + n, mask=j0 + n < N, other=0)
        score = gl.where((seen != 0)[None, :], score, float("-inf"))
    return score
