"""The router of 33 to 128 experts on Hopper, in one kernel: affinities, selection, gates and sums.

    affinity_te = sum_d x_td * scale[cluster of t]_d * embedding_ed + bias_e + noise_te

It computes what triton/route.py does. A tile has 128 tokens and all experts. One producer warp
loads blocks of 64 features by TMA. Two consumer warpgroups have 64 tokens each: while one selects
experts, the other one multiplies. Tokens with a scale are rescaled on their way to the MMAs, as in
affinity.py, by the scale of each one's cluster: they need not be sorted. (Sorted by cluster, 64
tokens would read one row of scales instead of 64. But clusters are padded to whole blocks, and 12%
more tiles than multiprocessors take another round: 108 us instead of 87 for the affinities of
qwen30b on an H200.)

The sums of a block of features are those of the tensor cores, and blocks are added in float32, with
a scale and without one: a scale of one changes no bit.

Lower bound: x (T D 2 bytes) read once, 32 us at qwen30b. With a scale the limit is L2, from which
each block of 128 tokens takes 32 KiB of scales beside 16 KiB of tokens.

T tokens, D features, E experts, C clusters, K choices of each token.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from acmoe.ops.device.gluon_blocks import HALF_M, acc_layout, make_barriers, make_buffers
from acmoe.ops.device.gluon_names import load_tile
from acmoe.ops.route.hopper.scales import (
    BLOCK,
    CLUSTERS,
    SCALES,
    load_scales,
    rescale,
    store_clusters,
)
from acmoe.ops.route.hopper.select import select_experts, store_sums

TOKENS = gl.constexpr(2 * HALF_M.value)  # tokens of a tile


@gluon.jit
def _load_blocks(load_args):
    """Producer: load the blocks of x and of the embedding of all tiles of the program."""
    x_desc, embedding_desc, pipeline, num_tiles, num_k = load_args
    x_bufs, w_bufs, full, empty = pipeline
    STAGES: gl.constexpr = x_bufs.shape[0]
    k_block = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        for k in range(num_k):
            stage = k_block % STAGES
            full_bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (k_block // STAGES & 1) ^ 1)
            mbarrier.expect(full_bar, x_desc.block_type.nbytes + embedding_desc.block_type.nbytes)
            load_tile(x_desc, [tile * TOKENS, k * BLOCK], full_bar, x_bufs.index(stage))
            load_tile(embedding_desc, [0, k * BLOCK], full_bar, w_bufs.index(stage))
            k_block += 1


@gluon.jit
def _rescaled_product(high, low, w):
    """Return (high + low) @ w^T of tokens in registers."""
    WIDTH: gl.constexpr = w.shape[1]
    layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout(WIDTH), 2)
    high = gl.convert_layout(high, layout, assert_trivial=True)
    low = gl.convert_layout(low, layout, assert_trivial=True)
    acc = gl.zeros([HALF_M, WIDTH], gl.float32, acc_layout(WIDTH))
    acc = warpgroup_mma(low, w, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma(high, w, acc, use_acc=True, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _product(x, w):
    """Return x @ w^T of tokens in shared memory."""
    WIDTH: gl.constexpr = w.shape[1]
    acc = gl.zeros([HALF_M, WIDTH], gl.float32, acc_layout(WIDTH))
    acc = warpgroup_mma(x, w, acc, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _affinities(
    CONSUMER: gl.constexpr, pipeline, scale_bufs, scale_args, row, k_block, num_k,
    HAS_SCALE: gl.constexpr,
):  # fmt: skip
    """Return the affinities (64, WIDTH) of 64 tokens, from `row` on, without bias and noise."""
    x_bufs, w_bufs, full, empty = pipeline
    STAGES: gl.constexpr = x_bufs.shape[0]
    WIDTH: gl.constexpr = w_bufs.shape[1]
    affinity = gl.zeros([HALF_M, WIDTH], gl.float32, acc_layout(WIDTH))
    scale_buf, cluster_buf = scale_bufs[0].index(CONSUMER), scale_bufs[1].index(CONSUMER)
    if HAS_SCALE:
        has_scale = store_clusters(scale_args, row, cluster_buf)
        load_scales(scale_args, cluster_buf, 0, scale_buf)
    for k in range(num_k):
        stage = k_block % STAGES
        mbarrier.wait(full.index(stage), k_block // STAGES & 1)
        x = x_bufs.index(stage).slice(CONSUMER * HALF_M, HALF_M)
        w = w_bufs.index(stage).permute((1, 0))
        if HAS_SCALE:
            high, low = rescale(x, scale_buf, has_scale, False, 0)
            if k + 1 < num_k:
                load_scales(scale_args, cluster_buf, k + 1, scale_buf)
            affinity += _rescaled_product(high, low, w)
        else:
            affinity += _product(x, w)
        mbarrier.arrive(empty.index(stage))
        k_block += 1
    return affinity


@gluon.jit
def _add_and_store(
    affinity, rows, exist, affinity_args, E, HAS_BIAS: gl.constexpr, HAS_NOISE: gl.constexpr
):
    """Add bias and noise, and store the affinities; return them, -inf where there is no expert."""
    bias_ptr, noise_ptr, affinity_ptr = affinity_args
    WIDTH: gl.constexpr = affinity.shape[1]
    e = gl.arange(0, WIDTH, gl.SliceLayout(0, acc_layout(WIDTH)))
    offs = rows[:, None] * E + e[None, :]
    valid = exist[:, None] & (e < E)[None, :]
    if HAS_BIAS:
        affinity += gl.load(bias_ptr + e, mask=e < E, other=0.0).to(gl.float32)[None, :]
    if HAS_NOISE:
        affinity += gl.load(noise_ptr + offs, mask=valid, other=0.0)
    gl.store(affinity_ptr + offs, affinity, mask=valid)
    return gl.where((e < E)[None, :], affinity, float("-inf"))


@gluon.jit
def _consumer(
    CONSUMER: gl.constexpr, consumer_args, HAS_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_NOISE: gl.constexpr, HAS_SUMS: gl.constexpr, K: gl.constexpr, SELECTED: gl.constexpr,
):  # fmt: skip
    """Consumer: route the upper or lower 64 tokens of every tile."""
    pipeline, scale_bufs, scale_args, results, num_tiles, E = consumer_args
    affinity_args, out_args, sum_args = results
    inverse_temperature, partial_ptr = sum_args
    T, num_k = scale_args[2], scale_args[4] // BLOCK
    WIDTH: gl.constexpr = pipeline[1].shape[1]
    k_block = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row = tile * TOKENS + CONSUMER * HALF_M
        affinity = _affinities(
            CONSUMER, pipeline, scale_bufs, scale_args, row, k_block, num_k, HAS_SCALE
        )
        k_block += num_k
        rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, acc_layout(WIDTH)))
        exist, rows = rows < T, rows.to(gl.int64)
        affinity = _add_and_store(affinity, rows, exist, affinity_args, E, HAS_BIAS, HAS_NOISE)
        selected = select_experts(affinity, row, T, E, out_args, K, SELECTED)
        if HAS_SUMS:
            block, num_blocks = row // HALF_M, gl.cdiv(T, HALF_M)
            store_sums(
                *(affinity, selected, exist, block, num_blocks, E, inverse_temperature),
                partial_ptr,
            )


@gluon.jit(do_not_specialize=["T", "C", "num_tiles"])
def router_kernel(
    x_desc,
    embedding_desc,
    scale_ptr,
    cluster_ptr,
    bias_ptr,
    noise_ptr,
    affinity_ptr,
    ids_ptr,
    gate_ptr,
    first_ptr,
    partial_ptr,
    T,
    D,
    C,
    num_tiles,
    inverse_temperature,
    E: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_NOISE: gl.constexpr,
    HAS_SUMS: gl.constexpr,
    K: gl.constexpr,
    SELECTED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Route x (T, D), whose clusters' scales are (C, D), among E experts; D % 64 = 0.

    HAS_SUMS: store the gate sums and loads of each 64 tokens to partial (2, blocks, E); otherwise a
    zero.
    """
    if not HAS_SUMS:
        if gl.program_id(0) == 0:
            gl.store(partial_ptr, 0.0)
    x_bufs = make_buffers(STAGES, x_desc)
    w_bufs = make_buffers(STAGES, embedding_desc)
    full, empty = make_barriers(STAGES, 1, 2)
    pipeline = (x_bufs, w_bufs, full, empty)
    ROWS: gl.constexpr = HALF_M if HAS_SCALE else 1  # without a scale unused
    scale_bufs = (
        gl.allocate_shared_memory(gl.float32, [2, ROWS, BLOCK], SCALES),
        gl.allocate_shared_memory(gl.int32, [2, HALF_M], CLUSTERS),
    )
    scale_args = (scale_ptr, cluster_ptr, T, C, D)
    affinity_args = (bias_ptr, noise_ptr, affinity_ptr)
    out_args = (ids_ptr, gate_ptr, first_ptr)
    sum_args = (inverse_temperature, partial_ptr)
    results = (affinity_args, out_args, sum_args)
    consumer_args = (pipeline, scale_bufs, scale_args, results, num_tiles, E)
    gl.warp_specialize(
        [
            (_consumer, (0, consumer_args, HAS_SCALE, HAS_BIAS, HAS_NOISE, HAS_SUMS, K, SELECTED)),
            (_consumer, (1, consumer_args, HAS_SCALE, HAS_BIAS, HAS_NOISE, HAS_SUMS, K, SELECTED)),
            (_load_blocks, ((x_desc, embedding_desc, pipeline, num_tiles, D // BLOCK),)),
        ],
        [4, 1],
        [240, 24],
    )
