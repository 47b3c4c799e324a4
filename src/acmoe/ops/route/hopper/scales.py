"""Tokens of the router that a consumer warpgroup rescales in its registers (affinity.py).

A consumer owns 64 tokens. It copies their scales to shared memory by cp.async, a block of 64
features at a time, and multiplies the tokens by them in the registers from which MMAs read.

T tokens, D features, C clusters.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from acmoe.ops.device.gluon_blocks import HALF_M, acc_layout
from acmoe.ops.device.gluon_names import load_rows, thread_barrier

BLOCK = gl.constexpr(64)  # features of a block: 128 bytes, the swizzle width of shared memory
# Half a warp reads 256 consecutive bytes of float32 numbers, and no sector of 32 bytes twice.
ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
# Registers of a consumer that rescales 64 tokens at 64 features, as its MMAs read them. Four
# threads load 32 bytes of a row's scales together, so that 32 bytes are swizzled as one.
_OPERAND = gl.constexpr(gl.DotOperandLayout(0, acc_layout(64), 2))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
CLUSTERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# The bf16x2 split of x * scale for two numbers: high (0) and low (1) from x (2) and scale (3, 4).
# The compiler converts single numbers, which takes a GPU eight times as long as pairs.
SPLIT_ASM = gl.constexpr(
    """{
    .reg .f32 x0, x1, y0, y1;
    shl.b32 x0, $2, 16;
    and.b32 x1, $2, 0xffff0000;
    mul.rn.f32 y0, x0, $3;
    mul.rn.f32 y1, x1, $4;
    cvt.rn.bf16x2.f32 $0, y1, y0;
    shl.b32 y0, $0, 16;
    and.b32 y1, $0, 0xffff0000;
    neg.f32 y0, y0;
    neg.f32 y1, y1;
    fma.rn.f32 y0, x0, $3, y0;
    fma.rn.f32 y1, x1, $4, y1;
    cvt.rn.bf16x2.f32 $1, y1, y0;
    }"""
)


@gluon.jit
def own_scales(scale_args, rows):
    """Return the row (64,) of the tokens' scales, and if a token has one: without, it is 1."""
    _, cluster_ptr, T, C, _ = scale_args
    cluster = gl.load(cluster_ptr + rows, mask=rows < T, other=-1).to(gl.int32)
    has_scale = (cluster >= 0) & (cluster < C)
    return gl.where(has_scale, cluster, 0), has_scale


@gluon.jit
def store_clusters(scale_args, row, cluster_buf):
    """Store the clusters of 64 tokens to shared memory, and return if a token has a scale.

    MMAs and sums need 224 registers of 240, which leaves none to keep the clusters in.
    """
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, ROWS))
    clusters, _ = own_scales(scale_args, rows)
    cluster_buf.store(clusters)
    thread_barrier()
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, _OPERAND))
    _, has_scale = own_scales(scale_args, rows)
    return has_scale


@gluon.jit
def load_scales(scale_args, cluster_buf, k, buf):
    """Begin to copy the scales of block k of a consumer's tokens to shared memory."""
    scale_ptr, D = scale_args[0], scale_args[4]
    offsets = cluster_buf.load(gl.SliceLayout(1, ROWS)) * D
    d = k * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, ROWS))
    load_rows(buf, scale_ptr + offsets[:, None] + d[None, :])
    async_copy.commit_group()


@gluon.jit
def rescale(x_buf, scale_buf, has_scale, keeps, KEEPERS: gl.constexpr):
    """Return x * scale of a block as a bf16x2 split in registers.

    keeps: store the high parts in place of x, where TMA may read them after this call; KEEPERS is 0
    if no call does.
    """
    x = x_buf.load(_OPERAND)  # while the copies arrive
    async_copy.wait_group(0)
    thread_barrier()  # the copies of all warps are there
    scale = gl.where(has_scale[:, None], scale_buf.load(_OPERAND), 1.0)
    high, low = gl.inline_asm_elementwise(
        SPLIT_ASM, "=&r,=&r,r,r,r", [x, scale], (x.dtype, x.dtype), is_pure=True, pack=2
    )
    if KEEPERS > 0:
        if keeps:
            x_buf.store(high)
            fence_async_shared()
    thread_barrier()  # all warps have read the scales: the next block's may come
    return high, low
