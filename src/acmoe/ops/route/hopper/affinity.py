"""The affinities of many experts on Hopper, with tokens that are rescaled on their way to the MMAs.

    affinity_te = sum_d x_td * scale[cluster of t]_d * embedding_ed + bias_e + noise_te

One program runs on each multiprocessor and iterates over every num_programs-th tile of 128 tokens
and 256 experts. One producer warp loads blocks of 64 features of tokens and embeddings by TMA. Two
consumer warpgroups own 64 tokens each. A consumer multiplies its tokens by their scales, which it
loads by cp.async one block ahead, and writes the products as a bf16x2 split to shared memory, from
where its MMAs read them; meanwhile the other consumer keeps the tensor cores busy. So x * scale is
written to no memory, where rescale.py writes twice the bytes of x and reads them back.

The sums of a block are those of the tensor cores, and blocks are added in float32
(ops/device/dot.py): in the order of affinity.py, so that a scale of one changes no bit. Half of the
experts is multiplied at a time, because the result needs registers beside both sums.

T tokens, D features, E experts, C clusters.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from acmoe.ops.device.gluon_names import load_rows, load_tile, thread_barrier
from acmoe.ops.experts.hopper.pipeline import HALF_M, acc_layout, make_barriers, make_buffers

BLOCK = gl.constexpr(64)  # features of a block: 128 bytes, the swizzle width of shared memory
HALF_N = gl.constexpr(128)  # experts of one MMA
TOKENS = gl.constexpr(2 * 64)  # tokens of a tile
EXPERTS = gl.constexpr(2 * 128)  # experts of a tile
# Registers of a consumer that rescales 64 tokens at 64 features: 8 features a thread at a time.
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _load_blocks(load_args):
    """Producer: load the blocks of x and of the embedding of all tiles of the program."""
    x_desc, embedding_desc, pipeline, sizes = load_args
    x_bufs, w_bufs, full, empty = pipeline
    num_tiles, num_e, num_k = sizes[0], sizes[1], sizes[2]
    STAGES: gl.constexpr = x_bufs.shape[0]
    k_block = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, expert = tile // num_e * TOKENS, tile % num_e * EXPERTS
        for k in range(num_k):
            stage = k_block % STAGES
            full_bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
            mbarrier.expect(full_bar, x_desc.block_type.nbytes + embedding_desc.block_type.nbytes)
            load_tile(x_desc, [row, k * BLOCK], full_bar, x_bufs.index(stage))
            load_tile(embedding_desc, [expert, k * BLOCK], full_bar, w_bufs.index(stage))
            k_block += 1


@gluon.jit
def own_scales(scale_args, rows):
    """Return offsets (64,) of the tokens' scales, and if a token has one: without, it is 1."""
    _, cluster_ptr, T, C, D = scale_args
    cluster = gl.load(cluster_ptr + rows, mask=rows < T, other=-1).to(gl.int32)
    has_scale = (cluster >= 0) & (cluster < C)
    return gl.where(has_scale, cluster, 0) * D, has_scale


@gluon.jit
def _load_scales(scale_ptr, offsets, k, buf):
    """Begin to copy the scales of block k of a consumer's tokens to shared memory."""
    d = k * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, ROWS))
    load_rows(buf, scale_ptr + offsets[:, None] + d[None, :])
    async_copy.commit_group()


@gluon.jit
def _rescale(x, scale_buf, has_scale, high_buf, low_buf):
    """Write x * scale of a block as a bf16x2 split for the MMAs."""
    async_copy.wait_group(0)
    thread_barrier()  # all warps have read the previous block's split
    scale = gl.where(has_scale[:, None], scale_buf.load(ROWS), 1.0)
    y = x.load(ROWS).to(gl.float32) * scale
    high = y.to(gl.bfloat16)
    high_buf.store(high)
    low_buf.store((y - high.to(gl.float32)).to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _product(high, low, w, HAS_SCALE: gl.constexpr):
    """Return (high + low) @ w^T of half of the experts; without a scale high alone is read."""
    w = w.permute((1, 0))
    acc = gl.zeros([HALF_M, HALF_N], gl.float32, acc_layout(HALF_N))
    if HAS_SCALE:
        acc = warpgroup_mma(low, w, acc, use_acc=False, is_async=True)
        acc = warpgroup_mma(high, w, acc, use_acc=True, is_async=True)
    else:
        acc = warpgroup_mma(high, w, acc, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _store(affinity, out_args, row, expert, HAS_BIAS: gl.constexpr, HAS_NOISE: gl.constexpr):
    """Add bias and noise to the affinities of 64 tokens and 128 experts, and store them."""
    bias_ptr, noise_ptr, affinity_ptr, T, E = out_args
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, acc_layout(HALF_N)))
    experts = expert + gl.arange(0, HALF_N, gl.SliceLayout(0, acc_layout(HALF_N)))
    offs = rows.to(gl.int64)[:, None] * E + experts[None, :]
    valid = (rows < T)[:, None] & (experts < E)[None, :]
    if HAS_BIAS:
        affinity += gl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(gl.float32)[None, :]
    if HAS_NOISE:
        affinity += gl.load(noise_ptr + offs, mask=valid, other=0.0)
    gl.store(affinity_ptr + offs, affinity, mask=valid)


@gluon.jit
def _consumer(
    CONSUMER: gl.constexpr, consumer_args, HAS_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_NOISE: gl.constexpr,
):  # fmt: skip
    """Consumer: the affinities of the upper or lower 64 tokens of every tile."""
    pipeline, split_bufs, scale_bufs, scale_args, out_args, sizes = consumer_args
    x_bufs, w_bufs, full, empty = pipeline
    num_tiles, num_e, num_k = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    k_block = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, expert = tile // num_e * TOKENS + CONSUMER * HALF_M, tile % num_e * EXPERTS
        left = gl.zeros([HALF_M, HALF_N], gl.float32, acc_layout(HALF_N))
        right = gl.zeros([HALF_M, HALF_N], gl.float32, acc_layout(HALF_N))
        if HAS_SCALE:
            rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, ROWS))
            offsets, has_scale = own_scales(scale_args, rows)
            _load_scales(scale_args[0], offsets, 0, scale_bufs.index(CONSUMER))
        for k in range(num_k):
            stage = k_block % STAGES
            mbarrier.wait(full.index(stage), k_block // STAGES & 1)
            high = x_bufs.index(stage).slice(CONSUMER * HALF_M, HALF_M)
            low = high
            if HAS_SCALE:
                x, scale_buf = high, scale_bufs.index(CONSUMER)
                high, low = split_bufs.index(2 * CONSUMER), split_bufs.index(2 * CONSUMER + 1)
                _rescale(x, scale_buf, has_scale, high, low)
                if k + 1 < num_k:
                    _load_scales(scale_args[0], offsets, k + 1, scale_buf)
            w = w_bufs.index(stage)
            left += _product(high, low, w.slice(0, HALF_N), HAS_SCALE)
            right += _product(high, low, w.slice(HALF_N, HALF_N), HAS_SCALE)
            mbarrier.arrive(empty.index(stage))
            k_block += 1
        _store(left, out_args, row, expert, HAS_BIAS, HAS_NOISE)
        _store(right, out_args, row, expert + HALF_N, HAS_BIAS, HAS_NOISE)


@gluon.jit(do_not_specialize=["T", "C", "num_tiles", "num_e"])
def affinity_kernel(
    x_desc,
    embedding_desc,
    scale_ptr,
    cluster_ptr,
    bias_ptr,
    noise_ptr,
    affinity_ptr,
    T,
    D,
    E,
    C,
    num_tiles,
    num_e,
    HAS_SCALE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_NOISE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute the affinities (T, E) of x (T, D), whose clusters' scales are (C, D); D % 64 = 0."""
    x_bufs = make_buffers(STAGES, x_desc)
    w_bufs = make_buffers(STAGES, embedding_desc)
    full, empty = make_barriers(STAGES, 1, 2)
    pipeline = (x_bufs, w_bufs, full, empty)
    sizes = (num_tiles, num_e, D // BLOCK)
    PARTS: gl.constexpr = 4 if HAS_SCALE else 1  # two for each consumer, or unused
    SCALES: gl.constexpr = 2 if HAS_SCALE else 1
    split_bufs = gl.allocate_shared_memory(gl.bfloat16, [PARTS, HALF_M, BLOCK], x_desc.layout)
    scale_bufs = gl.allocate_shared_memory(gl.float32, [SCALES, HALF_M, BLOCK], _SCALES)
    scale_args = (scale_ptr, cluster_ptr, T, C, D)
    out_args = (bias_ptr, noise_ptr, affinity_ptr, T, E)
    consumer_args = (pipeline, split_bufs, scale_bufs, scale_args, out_args, sizes)
    gl.warp_specialize(
        [
            (_consumer, (0, consumer_args, HAS_SCALE, HAS_BIAS, HAS_NOISE)),
            (_consumer, (1, consumer_args, HAS_SCALE, HAS_BIAS, HAS_NOISE)),
            (_load_blocks, ((x_desc, embedding_desc, pipeline, sizes),)),
        ],
        [4, 1],
        [240, 24],
    )
