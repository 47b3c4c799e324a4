"""Producer warps of the dk/dv kernel on Hopper: schedule of tiles, TMA loads and descriptors.

Each consumer warpgroup has a TMA pipeline of its own for the saved weights, with a producer warp of
its own (`produce_weights`). All consumers share the queries and grad_out: query tile t of a head
has slot t of shared memory, and one more producer warp (`produce_queries`) loads the tile of the
next head into it once every consumer has released it. The later a tile of keys, the later the
queries that see it, so the slots are released in order.

`schedule` is (first, end, heads, L, N, W): the program visits the tiles of keys first .. end - 1 of
each of `heads` heads. Tiles of keys are numbered across all of these heads, and consumer c takes
the numbers c, c + CONSUMERS, .. . Shapes as in keys.py.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from acmoe.ops.attention.triton.skew import MARGIN, SKEW, SkewLayout
from acmoe.ops.device.gluon_names import load_tile
from acmoe.ops.device.tma import swizzled

BLOCK = gl.constexpr(64)  # queries per tile, and keys per tile
CONSUMERS = gl.constexpr(3)  # warpgroups


@gluon.jit
def tile_schedule(num, L, N, span):
    """Compute a program's schedule. Programs split the `num` heads and, where there are few heads,
    the keys of each."""
    tiles = gl.cdiv(N, BLOCK)
    first = gl.program_id(1) * tiles // gl.num_programs(1)
    end = (gl.program_id(1) + 1) * tiles // gl.num_programs(1)
    return first, end, gl.cdiv(num - gl.program_id(0), gl.num_programs(0)), L, N, span


@gluon.jit
def key_tile(n, schedule):
    """Return, for the n-th tile of keys, the index of its head in the program, the head, and its
    first key."""
    first, end, _, _, _, _ = schedule
    head_index = n // (end - first)
    x = gl.program_id(0) + head_index * gl.num_programs(0)
    return head_index, x, (first + n % (end - first)) * BLOCK


@gluon.jit
def query_tile_range(j0, schedule):
    """Return the first and the end of the query tiles that see the keys from j0 on.

    No query sees the last key.
    """
    _, _, _, L, N, span = schedule
    low = gl.maximum(j0 + 1 - (N - L), 0) // BLOCK
    end = gl.where(j0 + 1 < N, gl.minimum(j0 + BLOCK + span - (N - L), L), 0)
    return low, gl.maximum((end + BLOCK - 1) // BLOCK, low)


@gluon.jit
def produce_weights(weight_desc, max_desc, pipeline, schedule, GROUP: gl.constexpr):
    """Load the weight tiles of consumer GROUP in its order, each with its running row maxima."""
    tiles, row_max, full, empty = pipeline
    stages: gl.constexpr = tiles.shape[0]
    iteration = 0
    for n in range(GROUP, schedule[2] * (schedule[1] - schedule[0]), CONSUMERS):
        _, x, j0 = key_tile(n, schedule)
        low, high = query_tile_range(j0, schedule)
        for t in range(low, high):
            stage = iteration % stages
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (iteration // stages & 1) ^ 1)
            mbarrier.expect(ready, weight_desc.block_type.nbytes + max_desc.block_type.nbytes)
            load_tile(weight_desc, [x, t * SKEW, 0, j0], ready, tiles.index(stage))
            load_tile(max_desc, [x, j0 // BLOCK, t * BLOCK], ready, row_max.index(stage))
            iteration += 1


@gluon.jit
def produce_queries(
    queries, grads, vectors, num_heads, full, empty, schedule, BYTES: gl.constexpr,
    KV_DIM: gl.constexpr,
):  # fmt: skip
    """Load all query tiles of every head: q, grad_out, and vectors with one element per query.

    queries, grads and vectors are tuples of (TMA descriptor, shared-memory tiles).
    """
    for head_index in range(0, schedule[2]):
        x = gl.program_id(0) + head_index * gl.num_programs(0)
        for t in range(0, full.shape[0]):
            ready = full.index(t)
            mbarrier.wait(empty.index(t), (head_index & 1) ^ 1)
            mbarrier.expect(ready, BYTES)
            for i in gl.static_range(len(queries)):
                desc, tiles = queries[i]
                load_tile(desc, [x, t * BLOCK, 0], ready, tiles.index(t))
                desc, tiles = grads[i]
                offsets = [x // num_heads, t * BLOCK, x % num_heads * KV_DIM]
                load_tile(desc, offsets, ready, tiles.index(t))
            for i in gl.static_range(len(vectors)):
                desc, tiles = vectors[i]
                load_tile(desc, [x, t * BLOCK], ready, tiles.index(t))


@gluon.jit
def release_queries(released, until, full, empty):
    """Release the query tiles from `released` to `until`, numbered across all heads.

    The consumer also waits for tiles that it never read: an mbarrier wait distinguishes a phase
    only from the phases next to it, so no phase may be skipped.
    """
    tiles: gl.constexpr = full.shape[0]
    for index in range(released, until):
        t = index % tiles
        mbarrier.wait(full.index(t), index // tiles & 1)
        mbarrier.arrive(empty.index(t), count=1)
    return until


def _descriptor(
    t: Tensor, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    """Return a TMA descriptor with the default shared-memory layout of its blocks."""
    if t.dtype == torch.float32:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    else:
        layout = swizzled(*block, dtype=t.dtype)
    return TensorDescriptor(t, shape, strides, block, layout)


def weight_descriptor(weights: Tensor, num: int, skew: SkewLayout) -> TensorDescriptor:
    """Return a descriptor for tiles of the skewed buffer: heads, rows, planes, keys.

    The keys are rounded up to whole tiles.
    """
    side = BLOCK.value
    shape = [num, skew.rows, 8, -(-skew.keys // side) * side]
    strides = [skew.rows * skew.pitch, skew.pitch - 8, num * skew.rows * skew.pitch, 1]
    return _descriptor(weights[MARGIN + 8 * skew.key0_block :], shape, strides, [1, 8, 8, side])


def query_descriptor(t: Tensor, first: int, width: int) -> TensorDescriptor:
    """Return a descriptor for tiles of features first .. first + width - 1 of contiguous q."""
    num, length, features = t.shape[0] * t.shape[1], t.shape[2], t.shape[3]
    strides = [length * features, features, 1]
    return _descriptor(t[..., first:], [num, length, width], strides, [1, BLOCK.value, width])


def grad_descriptor(t: Tensor, first: int, width: int) -> TensorDescriptor:
    """Return a descriptor for tiles of grad_out, laid out by `empty_output`.

    A tile has the features first .. first + width - 1 of a head.
    """
    batch, heads, length, features = t.shape
    strides = [length * heads * features, heads * features, 1]
    shape = [batch, length, heads * features - first]
    return _descriptor(t[..., first:], shape, strides, [1, BLOCK.value, width])


def vector_descriptor(t: Tensor) -> TensorDescriptor:
    """Return a descriptor for 64 queries of a contiguous tensor whose last dimension is queries."""
    block = [1] * (t.dim() - 1) + [BLOCK.value]
    return _descriptor(t, [*t.shape], [*t.stride()], block)
