"""What a program of the keys' gradients on Hopper walks over, and how the copy engine brings it.

A group of warps has a ring of its own for weights, filled by a warp of its own. Queries and their
output's gradients all groups share: tile t of a head has place t of shared memory, and another warp
fills it for the next head as soon as no group needs it for this one. The later a tile of keys, the
later the queries that see it, so that places come back one after the other.

`walk` is (first, end, heads, L, N, W): the tiles of a head's keys that a program takes, from first
to end, of so many heads; tiles are counted over all of them. Shapes as in attention_keys.py.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from acmoe.ops.attention.triton.skew import MARGIN, Band
from acmoe.ops.device.gluon_names import load_tile

BLOCK = gl.constexpr(64)  # queries and keys of a tile
COMB = gl.constexpr(8)
GROUPS = gl.constexpr(3)


@gluon.jit
def walk_of(num, L, N, span):
    """Programs share the heads, and if there are few of these, the keys of each."""
    tiles = gl.cdiv(N, BLOCK)
    first = gl.program_id(1) * tiles // gl.num_programs(1)
    end = (gl.program_id(1) + 1) * tiles // gl.num_programs(1)
    return first, end, gl.cdiv(num - gl.program_id(0), gl.num_programs(0)), L, N, span


@gluon.jit
def place_of(n, walk):
    """The n-th tile of keys: the head's number in the program, the head, and the first key."""
    first, end, _, _, _, _ = walk
    turn = n // (end - first)
    x = gl.program_id(0) + turn * gl.num_programs(0)
    return turn, x, (first + n % (end - first)) * BLOCK


@gluon.jit
def queries_for(j0, walk):
    """The first tile of queries that see a tile of keys, and the end of them. Nobody sees the last
    key."""
    _, _, _, L, N, span = walk
    low = gl.maximum(j0 + 1 - (N - L), 0) // BLOCK
    end = gl.where(j0 + 1 < N, gl.minimum(j0 + BLOCK + span - (N - L), L), 0)
    return low, gl.maximum((end + BLOCK - 1) // BLOCK, low)


@gluon.jit
def fetch_weights(kept_desc, base_desc, ring, walk, GROUP: gl.constexpr):
    """The weights that a group takes, in its order, and the bases that they are relative to."""
    tiles, bases, full, empty = ring
    stages: gl.constexpr = tiles.shape[0]
    at = 0
    for n in range(GROUP, walk[2] * (walk[1] - walk[0]), GROUPS):
        _, x, j0 = place_of(n, walk)
        low, high = queries_for(j0, walk)
        for t in range(low, high):
            slot = at % stages
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), (at // stages & 1) ^ 1)
            mbarrier.expect(ready, kept_desc.block_type.nbytes + base_desc.block_type.nbytes)
            load_tile(kept_desc, [x, t * COMB, 0, j0], ready, tiles.index(slot))
            load_tile(base_desc, [x, j0 // BLOCK, t * BLOCK], ready, bases.index(slot))
            at += 1


@gluon.jit
def fetch_queries(
    rows, grads, numbers, num_heads, full, empty, walk, BYTES: gl.constexpr, STORED: gl.constexpr
):  # fmt: skip
    """All tiles of queries of every head: pairs of what the copy engine reads and where it goes, of
    rows of features, of the output's gradients, and of one number a query."""
    for turn in range(0, walk[2]):
        x = gl.program_id(0) + turn * gl.num_programs(0)
        for t in range(0, full.shape[0]):
            ready = full.index(t)
            mbarrier.wait(empty.index(t), (turn & 1) ^ 1)
            mbarrier.expect(ready, BYTES)
            for i in gl.static_range(len(rows)):
                desc, tiles = rows[i]
                load_tile(desc, [x, t * BLOCK, 0], ready, tiles.index(t))
                desc, tiles = grads[i]
                corner = [x // num_heads, t * BLOCK, x % num_heads * STORED]
                load_tile(desc, corner, ready, tiles.index(t))
            for i in gl.static_range(len(numbers)):
                desc, tiles = numbers[i]
                load_tile(desc, [x, t * BLOCK], ready, tiles.index(t))


@gluon.jit
def give_back(given, until, full, empty):
    """Tiles of queries, counted over all heads, that a group needs no more.

    It waits for those it never read, too: a wait tells a barrier's phase only from the ones next
    to it.
    """
    tiles: gl.constexpr = full.shape[0]
    for number in range(given, until):
        t = number % tiles
        mbarrier.wait(full.index(t), number // tiles & 1)
        mbarrier.arrive(empty.index(t), count=1)
    return until


def _box(t: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """How the copy engine finds blocks in memory."""
    if t.dtype == torch.float32:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    else:
        dtype = gl.bfloat16 if t.dtype == torch.bfloat16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(t, shape, strides, block, layout)


def weights_box(kept: Tensor, num: int, band: Band) -> TensorDescriptor:
    """Tiles of kept weights: heads, rows, planes and keys, these up to a whole tile."""
    side = BLOCK.value
    shape = [num, band.rows, 8, -(-band.keys // side) * side]
    strides = [band.rows * band.pitch, band.pitch - 8, num * band.rows * band.pitch, 1]
    return _box(kept[MARGIN + 8 * band.shift :], shape, strides, [1, 8, 8, side])


def rows_box(t: Tensor, first: int, width: int) -> TensorDescriptor:
    """Tiles of queries, some features of each; t (B, H, L, P) is contiguous."""
    num, length, features = t.shape[0] * t.shape[1], t.shape[2], t.shape[3]
    strides = [length * features, features, 1]
    return _box(t[..., first:], [num, length, width], strides, [1, BLOCK.value, width])


def grads_box(t: Tensor, first: int, width: int) -> TensorDescriptor:
    """Tiles of the output's gradients, some features of a head; t is as `empty_output` has it."""
    batch, heads, length, features = t.shape
    strides = [length * heads * features, heads * features, 1]
    shape = [batch, length, heads * features - first]
    return _box(t[..., first:], shape, strides, [1, BLOCK.value, width])


def numbers_box(t: Tensor) -> TensorDescriptor:
    """One number each query of a tile; t is contiguous, queries last."""
    block = [1] * (t.dim() - 1) + [BLOCK.value]
    return _box(t, [*t.shape], [*t.stride()], block)
