"""The affinities of many experts on Hopper, with tokens that are rescaled on their way to the MMAs.

    affinity_te = sum_d x_td * scale[cluster of t]_d * embedding_ed + bias_e + noise_te

One program runs on each multiprocessor and iterates over every num_programs-th tile of 128 tokens
and 256 experts. One producer warp loads blocks of 64 features of tokens and embeddings by TMA. Two
consumer warpgroups own 64 tokens each. Without a scale, MMAs read the tokens from shared memory.
With one, a consumer multiplies its tokens by their scales, which it loads by cp.async one block
ahead, and splits the products in two bf16 numbers (bf16x2), which MMAs read from its registers. So
x * scale is written to no memory, where rescale.py writes twice the bytes of x and reads them back.
Only the high parts are, on demand: the gradient of the embedding needs them. They take the place of
the tokens in shared memory, from which TMA stores them while the MMAs run.

The limit is shared memory, which moves 128 bytes a cycle. MMAs of a block take 2,048 cycles, and it
takes as many to pass on tokens (256), scales (512) and the embedding (256 to store, 1,024 for MMAs
to read). Parts in shared memory would take 256 more to write and at least 512 to read. Scales are
laid out so that neither their copies nor their loads meet in a bank.

The sums of a block are those of the tensor cores, and blocks are added in float32
(ops/device/dot.py): in the order of affinity.py, so that a scale of one changes no bit. A part of
the experts is multiplied at a time, because the result needs registers beside all sums.

T tokens, D features, E experts, C clusters.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from acmoe.ops.device.gluon_blocks import HALF_M, acc_layout, make_barriers, make_buffers
from acmoe.ops.device.gluon_names import load_tile, store_tile
from acmoe.ops.route.hopper.scales import (
    BLOCK,
    CLUSTERS,
    SCALES,
    load_scales,
    rescale,
    store_clusters,
)

HALF_N = gl.constexpr(128)  # experts of one MMA of tokens without a scale
QUARTER_N = gl.constexpr(64)  # experts of one MMA of split tokens: two results fit at a time
TOKENS = gl.constexpr(2 * HALF_M.value)  # tokens of a tile
EXPERTS = gl.constexpr(2 * HALF_N.value)  # experts of a tile


@gluon.jit
def _load_blocks(load_args):
    """Producer: load the blocks of x and of the embedding of all tiles of the program."""
    x_desc, embedding_desc, pipeline, sizes = load_args
    x_bufs, w_bufs, full, empty, _ = pipeline
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
def _start_quarter(high, low, w, QUARTER: gl.constexpr):
    """Begin (high + low) @ w^T of a quarter of the experts: two MMAs to wait for."""
    w = w.slice(QUARTER * QUARTER_N, QUARTER_N).permute((1, 0))
    acc = gl.zeros([HALF_M, QUARTER_N], gl.float32, acc_layout(QUARTER_N))
    acc = warpgroup_mma(low, w, acc, use_acc=False, is_async=True)
    return warpgroup_mma(high, w, acc, use_acc=True, is_async=True)


@gluon.jit
def _rescaled_tile(
    CONSUMER: gl.constexpr, pipeline, scale_bufs, scale_args, kept_args, row, k_block, num_k,
    KEEPERS: gl.constexpr,
):  # fmt: skip
    """Return the products of 64 rescaled tokens and each quarter of the experts.

    While a quarter's result is added, the MMAs of the next one run. Consumers take turns with the
    MMAs of a block: one rescales while the other multiplies. The KEEPERS tiles of a token take
    turns to store the high parts of its blocks, so that programs have equal work.
    """
    kept_desc, e_tile = kept_args
    scale_buf, cluster_buf = scale_bufs[0].index(CONSUMER), scale_bufs[1].index(CONSUMER)
    x_bufs, w_bufs, full, empty, turn = pipeline
    STAGES: gl.constexpr = x_bufs.shape[0]
    first = gl.zeros([HALF_M, QUARTER_N], gl.float32, acc_layout(QUARTER_N))
    second, third, fourth = first, first, first
    has_scale = store_clusters(scale_args, row, cluster_buf)
    load_scales(scale_args, cluster_buf, 0, scale_buf)
    for k in range(num_k):
        stage = k_block % STAGES
        mbarrier.wait(full.index(stage), k_block // STAGES & 1)
        x, w = x_bufs.index(stage).slice(CONSUMER * HALF_M, HALF_M), w_bufs.index(stage)
        keeps = k % KEEPERS == e_tile if KEEPERS > 0 else False
        high, low = rescale(x, scale_buf, has_scale, keeps, KEEPERS)
        if KEEPERS > 0:
            if keeps:
                store_tile(kept_desc, [row, k * BLOCK], x)  # while the MMAs run
        if k + 1 < num_k:
            load_scales(scale_args, cluster_buf, k + 1, scale_buf)
        mbarrier.wait(turn.index(CONSUMER), (k_block & 1) ^ (1 - CONSUMER))
        even = _start_quarter(high, low, w, 0)
        odd = _start_quarter(high, low, w, 1)
        even, odd = warpgroup_mma_wait(2, deps=[even, odd])
        first += even
        even = _start_quarter(high, low, w, 2)
        odd, even = warpgroup_mma_wait(2, deps=[odd, even])
        second += odd
        odd = _start_quarter(high, low, w, 3)
        mbarrier.arrive(turn.index(1 - CONSUMER))
        even, odd = warpgroup_mma_wait(2, deps=[even, odd])
        third += even
        fourth += warpgroup_mma_wait(0, deps=[odd])
        if KEEPERS > 0:
            tma.store_wait(0)  # the store has read the stage, which may be loaded again
        mbarrier.arrive(empty.index(stage))
        k_block += 1
    return first, second, third, fourth


@gluon.jit
def _half_product(x, w, HALF: gl.constexpr):
    """Return x @ w^T of half of the experts."""
    w = w.slice(HALF * HALF_N, HALF_N).permute((1, 0))
    acc = gl.zeros([HALF_M, HALF_N], gl.float32, acc_layout(HALF_N))
    acc = warpgroup_mma(x, w, acc, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _plain_tile(CONSUMER: gl.constexpr, pipeline, k_block, num_k):
    """Return the products of 64 tokens without a scale and each half of the experts."""
    x_bufs, w_bufs, full, empty, _ = pipeline
    STAGES: gl.constexpr = x_bufs.shape[0]
    left = gl.zeros([HALF_M, HALF_N], gl.float32, acc_layout(HALF_N))
    right = left
    for k in range(num_k):
        at_block = k_block + k
        stage = at_block % STAGES
        mbarrier.wait(full.index(stage), at_block // STAGES & 1)
        x, w = x_bufs.index(stage).slice(CONSUMER * HALF_M, HALF_M), w_bufs.index(stage)
        left += _half_product(x, w, 0)
        right += _half_product(x, w, 1)
        mbarrier.arrive(empty.index(stage))
    return left, right


@gluon.jit
def _store(affinity, out_args, row, expert, HAS_BIAS: gl.constexpr, HAS_NOISE: gl.constexpr):
    """Add bias and noise to the affinities of 64 tokens and some experts, and store them."""
    bias_ptr, noise_ptr, affinity_ptr, T, E = out_args
    layout: gl.constexpr = acc_layout(affinity.shape[1])
    rows = row + gl.arange(0, HALF_M, gl.SliceLayout(1, layout))
    experts = expert + gl.arange(0, affinity.shape[1], gl.SliceLayout(0, layout))
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
    HAS_NOISE: gl.constexpr, KEEPERS: gl.constexpr,
):  # fmt: skip
    """Consumer: the affinities of the upper or lower 64 tokens of every tile."""
    pipeline, scale_bufs, scale_args, kept_desc, out_args, sizes = consumer_args
    num_tiles, num_e, num_k = sizes
    k_block = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, expert = tile // num_e * TOKENS + CONSUMER * HALF_M, tile % num_e * EXPERTS
        if HAS_SCALE:
            parts = _rescaled_tile(
                *(CONSUMER, pipeline, scale_bufs, scale_args, (kept_desc, tile % num_e)),
                *(row, k_block, num_k, KEEPERS),
            )
        else:
            parts = _plain_tile(CONSUMER, pipeline, k_block, num_k)
        k_block += num_k
        for part in gl.static_range(len(parts)):
            start = expert + part * (EXPERTS // len(parts))
            _store(parts[part], out_args, row, start, HAS_BIAS, HAS_NOISE)


@gluon.jit(do_not_specialize=["T", "C", "num_tiles", "num_e"])
def affinity_kernel(
    x_desc,
    embedding_desc,
    kept_desc,
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
    KEEPERS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute the affinities (T, E) of x (T, D), whose clusters' scales are (C, D); D % 64 = 0.

    KEEPERS: num_e to store x * scale, rounded to bf16, by kept_desc as well; otherwise 0.
    """
    x_bufs = make_buffers(STAGES, x_desc)
    w_bufs = make_buffers(STAGES, embedding_desc)
    full, empty = make_barriers(STAGES, 1, 2)
    turn, _ = make_barriers(2, 1, 1)
    pipeline = (x_bufs, w_bufs, full, empty, turn)
    sizes = (num_tiles, num_e, D // BLOCK)
    COPIES: gl.constexpr = 2 if HAS_SCALE else 1  # one for each consumer, or unused
    scale_bufs = (
        gl.allocate_shared_memory(gl.float32, [COPIES, HALF_M, BLOCK], SCALES),
        gl.allocate_shared_memory(gl.int32, [COPIES, HALF_M], CLUSTERS),
    )
    scale_args = (scale_ptr, cluster_ptr, T, C, D)
    out_args = (bias_ptr, noise_ptr, affinity_ptr, T, E)
    consumer_args = (pipeline, scale_bufs, scale_args, kept_desc, out_args, sizes)
    gl.warp_specialize(
        [
            (_consumer, (0, consumer_args, HAS_SCALE, HAS_BIAS, HAS_NOISE, KEEPERS)),
            (_consumer, (1, consumer_args, HAS_SCALE, HAS_BIAS, HAS_NOISE, KEEPERS)),
            (_load_blocks, ((x_desc, embedding_desc, pipeline, sizes),)),
        ],
        [4, 1],
        [240, 24],
    )
