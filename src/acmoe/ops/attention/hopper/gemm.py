"""Tensor-core GEMMs of the forward kernel on Hopper, over a head dimension of one or two chunks.

    score (64, 64)        += q (64, HEAD_DIM) @ tile^T, tile (64, HEAD_DIM) of keys or of rel_emb
    acc   (64, HEAD_DIM)  += weight (64, 64) @ v (64, HEAD_DIM)

One warpgroup runs each GEMM with asynchronous wgmma: q and weight are in registers, tiles in shared
memory. wgmma takes 16 features at a time, but a shared-memory tile must be a power of two wide.
Heads of 33 to 48 features are therefore split into chunks of 32 and 16 features: the last 16
padding features are not multiplied, and the accumulators are smaller. (H200, forward with 44
features: 462 -> 416 us.) TMA loads the chunks as separate tiles, because 16 padding features would
take the shared memory that the staging of saved weights needs.

q, acc and tiles are tuples of chunks. Shapes as in forward.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from acmoe.ops.attention.hopper.staging import ROWS, SCORE, query_of_row
from acmoe.ops.device.gluon_blocks import acc_layout

CHUNK0 = gl.constexpr(32)  # features of the first chunk, where there are two
CHUNK1 = gl.constexpr(16)
CHUNKED_DIM = gl.constexpr(CHUNK0.value + CHUNK1.value)  # the head dimension with two chunks


@gluon.jit
def _load_query_chunk(
    q_ptr, i0, L, P: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Load WIDTH features of a warpgroup's 64 queries as a wgmma operand in registers."""
    layout: gl.constexpr = gl.DotOperandLayout(0, SCORE, 2)
    m = i0 + query_of_row(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), GROUP)
    p = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    return gl.load(q_ptr + (m[:, None] * P + p[None, :]), mask=(m < L)[:, None], other=0.0)


@gluon.jit
def load_queries(q_ptr, i0, L, P: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr):
    """Load the queries of warpgroup GROUP, in chunks."""
    if HEAD_DIM == CHUNKED_DIM:
        first = _load_query_chunk(q_ptr, i0, L, P, CHUNK0, GROUP)
        return first, _load_query_chunk(q_ptr + CHUNK0, i0, L, P, CHUNK1, GROUP)
    else:
        return (_load_query_chunk(q_ptr, i0, L, P, HEAD_DIM, GROUP),)


def chunk_widths(features: int, width: int) -> tuple[int, int]:
    """Return the features of both chunks' tiles; `width` twice where there is only one chunk."""
    chunked = CHUNK0.value < features <= CHUNKED_DIM.value
    return (CHUNK0.value, CHUNK1.value) if chunked else (width, width)


@gluon.jit
def _stage_matrix(tiles, stage):
    """View the tile of a pipeline stage as a matrix, without its leading dimensions of size 1."""
    tile = tiles.index(stage)
    return tile.reshape([tile.shape[len(tile.shape) - 2], tile.shape[len(tile.shape) - 1]])


@gluon.jit
def stage_tile(tiles, WHICH: gl.constexpr, stage):
    """Return the chunks of the tile of keys (0), values (1) or rel_emb rows (2) of a stage."""
    first = _stage_matrix(tiles[0][WHICH], stage)
    if len(tiles) == 2:
        return first, _stage_matrix(tiles[1][WHICH], stage)
    else:
        return (first,)


@gluon.jit
def start_score_gemm(q, tile, acc, ACCUMULATE: gl.constexpr):
    """Issue q @ tile^T, added to acc or, unless ACCUMULATE, replacing it."""
    width: gl.constexpr = q[0].shape[1]
    chunk = tile[0].slice(0, width, 1).permute((1, 0))
    acc = warpgroup_mma(q[0], chunk, acc, use_acc=ACCUMULATE, is_async=True)
    if len(q) == 2:
        acc = warpgroup_mma(q[1], tile[1].permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def _zeros(WIDTH: gl.constexpr):
    """Return a (64, WIDTH) float32 accumulator of zeros."""
    return gl.zeros([ROWS, WIDTH], gl.float32, acc_layout(WIDTH))


@gluon.jit
def zero_accumulators(HEAD_DIM: gl.constexpr):
    """Return (64, HEAD_DIM) float32 accumulators of zeros, in chunks."""
    if HEAD_DIM == CHUNKED_DIM:
        return _zeros(CHUNK0), _zeros(CHUNK1)
    else:
        return (_zeros(HEAD_DIM),)


@gluon.jit
def _scale_rows(chunk, row_factor):
    return chunk * gl.convert_layout(row_factor, gl.SliceLayout(1, chunk.type.layout))[:, None]


@gluon.jit
def scale_rows(acc, row_factor):
    """Multiply each row of the accumulators by its own factor."""
    if len(acc) == 2:
        return _scale_rows(acc[0], row_factor), _scale_rows(acc[1], row_factor)
    else:
        return (_scale_rows(acc[0], row_factor),)


@gluon.jit
def _start_value_gemm(chunk, weight, v_tile):
    weight = gl.convert_layout(weight, gl.DotOperandLayout(0, chunk.type.layout, 2))
    return warpgroup_mma(weight, v_tile, chunk, is_async=True)


@gluon.jit
def start_value_gemm(acc, weight, v_tile):
    """Issue acc + weight @ v: one wgmma for each chunk."""
    width: gl.constexpr = acc[0].shape[1]
    first = _start_value_gemm(acc[0], weight, v_tile[0].slice(0, width, 1))
    if len(acc) == 2:
        return first, _start_value_gemm(acc[1], weight, v_tile[1])
    else:
        return (first,)


@gluon.jit
def wait_accumulators(acc):
    """Wait for all outstanding wgmma, and return the accumulators."""
    if len(acc) == 2:
        return warpgroup_mma_wait(0, deps=acc)
    else:
        return (warpgroup_mma_wait(0, deps=acc),)


@gluon.jit
def _store_chunk(chunk, out_ptr, i0, L, stride, OUT_DIM: gl.constexpr, GROUP: gl.constexpr):
    layout: gl.constexpr = chunk.type.layout
    row = i0 + query_of_row(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), GROUP)
    p = gl.arange(0, chunk.shape[1], gl.SliceLayout(0, layout))
    in_bounds = (row < L)[:, None] & (p < OUT_DIM)[None, :]
    offsets = row[:, None] * stride + p[None, :]
    gl.store(out_ptr + offsets, chunk.to(out_ptr.dtype.element_ty), mask=in_bounds)


@gluon.jit
def store_output(acc, out_ptr, i0, L, stride, OUT_DIM: gl.constexpr, GROUP: gl.constexpr):
    """Store the first OUT_DIM features of a warpgroup's output rows."""
    _store_chunk(acc[0], out_ptr, i0, L, stride, OUT_DIM, GROUP)
    if len(acc) == 2:
        _store_chunk(acc[1], out_ptr + CHUNK0, i0, L, stride, OUT_DIM - CHUNK0, GROUP)
