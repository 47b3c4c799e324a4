"""Tensor-core GEMMs of the dk/dv kernel on Hopper: rows are keys, columns are queries or features.

    dprob (64 keys, 64 queries)   = v @ grad_out^T
    dv    (64 keys, HEAD_DIM)    += prob (64 keys, 64 queries) @ grad_out
    dk    (64 keys, HEAD_DIM)    += dscore (64 keys, 64 queries) @ q

One warpgroup runs each GEMM with asynchronous wgmma; v, prob and dscore are in registers, the tiles
of q and grad_out in shared memory. As in gemm.py, heads of 33 to 48 features are split into chunks
of 32 and 16. Here the chunks are also separate tiles in shared memory, which leaves space for a
quarter more stages of weights. v, dk, dv and tiles are tuples of chunks. Shapes as in keys.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from acmoe.ops.attention.hopper.gemm import CHUNK0, CHUNK1, CHUNKED_DIM
from acmoe.ops.attention.hopper.keys_loads import BLOCK
from acmoe.ops.device.gluon_blocks import acc_layout

SCORE_T = gl.constexpr(acc_layout(64))


@gluon.jit
def _load_value_chunk(v_ptr, j0, N, stride, WIDTH: gl.constexpr):
    """Load WIDTH features of a tile of 64 values as a wgmma operand in registers."""
    layout: gl.constexpr = gl.DotOperandLayout(0, SCORE_T, 2)
    j = j0 + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    p = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    offsets = j[:, None].to(gl.int64) * stride + p[None, :]
    return gl.load(v_ptr + offsets, mask=(j < N)[:, None], other=0.0)


@gluon.jit
def load_values(v_ptr, j0, N, stride, HEAD_DIM: gl.constexpr):
    """Load a tile of 64 values, in chunks."""
    if HEAD_DIM == CHUNKED_DIM:
        first = _load_value_chunk(v_ptr, j0, N, stride, CHUNK0)
        return first, _load_value_chunk(v_ptr + CHUNK0, j0, N, stride, CHUNK1)
    else:
        return (_load_value_chunk(v_ptr, j0, N, stride, HEAD_DIM),)


@gluon.jit
def _tile_matrix(tiles, t):
    """View tile t as a matrix, without its leading dimension of size 1."""
    return tiles.index(t).reshape([BLOCK, tiles.shape[3]])


@gluon.jit
def start_dprob_gemm(v, grad_tiles, t):
    """Issue dprob = v @ grad_out^T, the gradient of the probabilities, for query tile t."""
    dprob = gl.zeros([BLOCK, BLOCK], gl.float32, SCORE_T)
    grad_out = _tile_matrix(grad_tiles[0], t).permute([1, 0])
    dprob = warpgroup_mma(v[0], grad_out, dprob, use_acc=False, is_async=True)
    if len(v) == 2:
        grad_out = _tile_matrix(grad_tiles[1], t).permute([1, 0])
        dprob = warpgroup_mma(v[1], grad_out, dprob, is_async=True)
    return dprob


@gluon.jit
def _start_chunk_gemm(acc, left, tile):
    left = gl.convert_layout(left, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(left, tile, acc, is_async=True)


@gluon.jit
def start_grad_gemm(acc, left, tiles, t):
    """Issue acc + left @ tile t, for dv (tiles of grad_out) or dk (tiles of q)."""
    first = _start_chunk_gemm(acc[0], left, _tile_matrix(tiles[0], t))
    if len(acc) == 2:
        return first, _start_chunk_gemm(acc[1], left, _tile_matrix(tiles[1], t))
    else:
        return (first,)


@gluon.jit
def wait_gradients(dk, dv):
    """Wait for all outstanding wgmma, and return the accumulators dk and dv."""
    if len(dk) == 2:
        a, b, c, d = warpgroup_mma_wait(0, deps=[dk[0], dk[1], dv[0], dv[1]])
        return (a, b), (c, d)
    else:
        a, c = warpgroup_mma_wait(0, deps=[dk[0], dv[0]])
        return (a,), (c,)


@gluon.constexpr_function
def _store_layout(width):
    """Layout with four features per thread, so that the four threads of a row store a 32-byte
    sector. Converting to it swaps two elements between pairs of threads, without shared memory;
    eight features per thread would need shared memory."""
    rest = [[0, 16 << bit] for bit in range((width // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *rest, [8, 0]],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )


@gluon.jit
def _store_chunk(chunk, ptr, j0, N, stride, scale):
    layout: gl.constexpr = _store_layout(chunk.shape[1])
    rows = gl.convert_layout((chunk * scale).to(ptr.dtype.element_ty), layout)
    j = j0 + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    p = gl.arange(0, chunk.shape[1], gl.SliceLayout(0, layout))
    gl.store(ptr + (j[:, None].to(gl.int64) * stride + p[None, :]), rows, mask=(j < N)[:, None])


@gluon.jit
def store_gradient(acc, ptr, j0, N, stride, scale):
    """Store scale * acc as the dk or dv of a tile of 64 keys."""
    _store_chunk(acc[0], ptr, j0, N, stride, scale)
    if len(acc) == 2:
        _store_chunk(acc[1], ptr + CHUNK0, j0, N, stride, scale)


def multiplied_dim(width: int, features: int) -> int:
    """Return the features of a head that are multiplied: 48 or the padded width.

    Features between `features` and `width` are zeros.
    """
    return CHUNKED_DIM.value if width == 64 and features <= CHUNKED_DIM.value else width


def chunks_of(head_dim: int) -> tuple[tuple[int, int], ...]:
    """Return (first feature, number of features) of each chunk."""
    if head_dim == CHUNKED_DIM.value:
        return (0, CHUNK0.value), (CHUNK0.value, CHUNK1.value)
    return ((0, head_dim),)
