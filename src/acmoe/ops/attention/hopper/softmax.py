"""Online softmax of one warpgroup's 64 queries on Hopper, one tile of 64 keys at a time, in base 2.

For each tile, with m the running row maximum and scale_log2 = scale * log2(e):

    weight  = exp2(scale_log2 * (score - m_new))
    rescale = exp2(scale_log2 * (m_old - m_new))
    row_sum = row_sum * rescale + rowsum(weight)

The four threads that share a row of the tensor-core layout each keep a partial row sum; the partial
sums are added once, after the last tile. Nothing but the key mask is read from memory, and
`store_lse` writes one number per query.

Shapes and names as in forward.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from acmoe.ops.attention.hopper.staging import KEYS, ROWS, SCORE, query_of_row

_PER_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)  # one element for each row of SCORE and each of the four threads that share the row


@gluon.jit
def zero_row_sums():
    """Return (64, 4) zeros: the partial row sums of the four threads of each row."""
    return gl.zeros([ROWS, 4], gl.float32, _PER_THREAD)


@gluon.jit
def _partial_row_sums(weight):
    """Sum each row of a tile inside each of its four threads, without communication."""
    sums = gl.sum(gl.sum(weight.reshape([ROWS, 8, 4, 2]), axis=3), axis=1)
    return gl.convert_layout(sums, _PER_THREAD, assert_trivial=True)


@gluon.jit
def online_softmax_step(score, row_max, row_sum, scale_log2):
    """Update the softmax statistics with a tile of scores.

    Returns the unnormalised weights of the tile, the scaled row maximum that they are relative to,
    the factor for the accumulators of earlier tiles, the new row maximum, and the new row sums.
    """
    new_max = gl.maximum(row_max, gl.max(score, axis=1))
    max_log2 = gl.where(new_max > float("-inf"), new_max, 0.0) * scale_log2  # -inf: no key yet
    weight = gl.exp2(score * scale_log2 - max_log2[:, None])
    rescale = gl.exp2(row_max * scale_log2 - max_log2)
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, _PER_THREAD), assert_trivial=True)
    return weight, max_log2, rescale, new_max, row_sum * factor[:, None] + _partial_row_sums(weight)


@gluon.jit
def store_lse(
    row_max, row_sum, lse_ptr, i0, L, scale_log2, KEEP_PROB: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Store the base-2 logsumexp of a warpgroup's queries, 0 where no key was seen.

    Returns 1 / (KEEP_PROB * row_sum), the factor that normalises the output rows.
    """
    row_sum = gl.convert_layout(
        gl.sum(row_sum, axis=1), gl.SliceLayout(1, SCORE), assert_trivial=True
    )
    empty = row_sum == 0.0
    norm = gl.where(empty, 0.0, 1.0 / KEEP_PROB) / gl.where(empty, 1.0, row_sum)
    lse = gl.where(empty, 0.0, row_max * scale_log2 + gl.log2(gl.where(empty, 1.0, row_sum)))
    i = i0 + query_of_row(gl.arange(0, ROWS, gl.SliceLayout(1, SCORE)), GROUP)
    gl.store(lse_ptr + i, lse, mask=i < L)
    return norm


@gluon.jit
def mask_scores(
    score, last_key, j0, interior_start, interior_end, span, key_mask_ptr, N,
    HAS_MASK: gl.constexpr,
):  # fmt: skip
    """Set scores outside the window or of masked keys to -inf.

    Tiles with interior_start <= j0 <= interior_end are inside the windows of all queries and skip
    the window mask. last_key (64,) is the last key that each query sees.
    """
    n = gl.arange(0, KEYS, gl.SliceLayout(0, SCORE))
    if (j0 < interior_start) | (j0 > interior_end):
        distance = last_key[:, None] - (j0 + n)[None, :]
        score = gl.where(distance.to(gl.uint32, bitcast=True) < span, score, float("-inf"))
    if HAS_MASK:
        visible = gl.load(key_mask_ptr + j0 + n, mask=j0 + n < N, other=0)
        score = gl.where((visible != 0)[None, :], score, float("-inf"))
    return score
