"""What a program of the forward on Hopper walks over, and how the copy engine brings it.

A step needs a tile of keys, one of values, and the table's next columns: three copies, and three
more of heads in two parts, each warpgroup its own. One barrier counts them. Another says when both
warpgroups are done with them. Shapes as in attention_hopper.py.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from acmoe.ops.attention.hopper.gemm import FIRST
from acmoe.ops.attention.hopper.staging import KEYS, QUERIES
from acmoe.ops.device.gluon_names import load_tile


def tiles_of(t: Tensor, features: int, width: int) -> TensorDescriptor:
    """How the copy engine reads `width` features of 64 rows; zeros beyond `features` it does not
    read, but knows."""
    block = [1] * (t.dim() - 2) + [64, width]
    dtype = gl.bfloat16 if t.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(t, [*t.shape[:-1], features], [*t.stride()], block, layout)


@gluon.jit
def walk_of(i0, L, N, span):
    """The first key and how many tiles of them; the first column of the table; and the first step,
    below 0: the first three tiles of the table precede those of keys, of which two may lie outside
    it."""
    S = N - L
    start = gl.maximum(S + i0 - span, 0) // KEYS * KEYS
    steps = gl.cdiv(S + gl.minimum(i0 + QUERIES, L) - 1 - start, KEYS)
    column = span - S - i0 - QUERIES + start
    return start, steps, column, gl.where(column <= -QUERIES, -1, -3)


@gluon.jit
def feed(s, walk, b, h, loads, PART: gl.constexpr):
    """Fetch one part of what step s needs: its keys and values, and the table's next columns."""
    descs, tiles, full, empty = loads
    k_desc, v_desc, table_desc = descs[PART]
    k_tiles, v_tiles, table_tiles = tiles[PART]
    start, _, column, first = walk
    stages: gl.constexpr = full.shape[0]
    tile_bytes: gl.constexpr = KEYS * table_tiles.shape[2] * 2
    p0: gl.constexpr = PART * FIRST
    turn = s - first
    at = turn % stages
    ready = full.index(at)
    mbarrier.wait(empty.index(at), (turn // stages & 1) ^ 1)
    if s >= 0:
        mbarrier.expect(ready, 3 * tile_bytes)
        j0 = start + s * KEYS
        load_tile(k_desc, [b, h, j0, p0], ready, k_tiles.index(at))
        load_tile(v_desc, [b, h, j0, p0], ready, v_tiles.index(at))
    else:
        mbarrier.expect(ready, tile_bytes)
    c0 = column + (s + 3) * KEYS
    load_tile(table_desc, [c0, p0], ready, table_tiles.index(at))


@gluon.jit
def await_tiles(s, first, full):
    """Where the tiles of step s are, when they are there."""
    stages: gl.constexpr = full.shape[0]
    at = (s - first) % stages
    mbarrier.wait(full.index(at), (s - first) // stages & 1)
    return at
