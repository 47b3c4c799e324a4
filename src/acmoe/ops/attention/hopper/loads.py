"""TMA loads of the forward kernel on Hopper, and the range of tiles that a program walks over.

Each step needs a tile of 64 keys, a tile of 64 values and the next 64 rows of the transposed
relative-position embedding rel_emb (W, P). A stage of the multistage pipeline holds these three
tiles for each head-dimension chunk (see gemm.py): three TMA copies, or six with two chunks. Each
warpgroup issues the copies of one chunk for both warpgroups. The mbarrier `full` of a stage counts
the copies that arrive; the mbarrier `empty` counts the two warpgroups that have finished reading.

`schedule` is (start, steps, column, first_step), see `tile_schedule`. `pipeline` is (descriptors,
tiles, full, empty), with one tuple of descriptors and one of tiles for each chunk. Shapes as in
forward.py.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from acmoe.ops.attention.hopper.gemm import CHUNK0
from acmoe.ops.attention.hopper.staging import KEYS, QUERIES
from acmoe.ops.device.gluon_names import load_tile
from acmoe.ops.device.tma import swizzled


def tile_descriptor(t: Tensor, features: int, width: int) -> TensorDescriptor:
    """Return a TMA descriptor for tiles of 64 rows and `width` features.

    Its last dimension has `features` elements: TMA fills the rest with zeros without reading it.
    """
    block = [1] * (t.dim() - 2) + [64, width]
    shape, layout = [*t.shape[:-1], features], swizzled(*block, dtype=t.dtype)
    return TensorDescriptor(t, shape, [*t.stride()], block, layout)


@gluon.jit
def tile_schedule(i0, L, N, span):
    """Compute the tiles that the program of queries i0 .. i0 + 127 visits.

    Returns the first key, the number of tiles of keys, the first row of rel_emb, and the first
    step, which is negative: the program multiplies three tiles of rel_emb before the first tile of
    keys. If two of them are outside rel_emb, the first step is -1 and they are skipped.
    """
    S = N - L
    start = gl.maximum(S + i0 - span, 0) // KEYS * KEYS
    steps = gl.cdiv(S + gl.minimum(i0 + QUERIES, L) - 1 - start, KEYS)
    column = span - S - i0 - QUERIES + start
    return start, steps, column, gl.where(column <= -QUERIES, -1, -3)


@gluon.jit
def load_stage(step, schedule, b, h, pipeline, CHUNK: gl.constexpr):
    """Issue the TMA loads of one chunk of the keys, values and rel_emb rows of a step.

    Waits until both warpgroups have released the stage. Negative steps load rel_emb only.
    """
    descs, tiles, full, empty = pipeline
    k_desc, v_desc, rel_desc = descs[CHUNK]
    k_tiles, v_tiles, rel_tiles = tiles[CHUNK]
    start, _, column, first_step = schedule
    stages: gl.constexpr = full.shape[0]
    tile_bytes: gl.constexpr = KEYS * rel_tiles.shape[2] * 2
    p0: gl.constexpr = CHUNK * CHUNK0
    iteration = step - first_step
    stage = iteration % stages
    ready = full.index(stage)
    mbarrier.wait(empty.index(stage), (iteration // stages & 1) ^ 1)
    if step >= 0:
        mbarrier.expect(ready, 3 * tile_bytes)
        j0 = start + step * KEYS
        load_tile(k_desc, [b, h, j0, p0], ready, k_tiles.index(stage))
        load_tile(v_desc, [b, h, j0, p0], ready, v_tiles.index(stage))
    else:
        mbarrier.expect(ready, tile_bytes)
    c0 = column + (step + 3) * KEYS
    load_tile(rel_desc, [c0, p0], ready, rel_tiles.index(stage))


@gluon.jit
def wait_stage(step, first_step, full):
    """Wait until the tiles of a step have arrived, and return their stage."""
    stages: gl.constexpr = full.shape[0]
    stage = (step - first_step) % stages
    mbarrier.wait(full.index(stage), (step - first_step) // stages & 1)
    return stage
