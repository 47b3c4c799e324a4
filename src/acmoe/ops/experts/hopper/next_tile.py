"""Dynamic order of tiles: a program takes its next tile shortly before the last one ends.

A tile of few rows takes less time than a full one. If program p took the tiles p, p + num_programs
and so on, the program with most full tiles would decide how long a launch takes. Programs would
also drift apart, so that tiles of one expert no longer read its weights from L2 at the same time.
Here the first tile of program p is p, and an atomic counter in global memory gives out the rest in
order. Each tile is computed by one program, so that results do not depend on who computes it.

One warp, the dispatcher, counts, and passes each number to the other partitions, the readers,
through a mailbox in shared memory with two mbarriers: "ready" (a number is there) and "wanted" (all
readers have begun the last one, so that it may be replaced). A reader delays its arrival at
"wanted" until the program should take its next tile. A number from num_tiles on ends the program.

The counter is zero before and after a launch: a program counts once for each tile that it computes,
so that count number num_tiles is the last one, and whoever gets it writes zero. Two launches that
run at the same time need two counters. The GEMMs of one plan share its counter: each needs the
result of the one before. Forward and backward have plans of their own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from acmoe.ops.device.gluon_blocks import make_barriers


@gluon.constexpr_function
def _one_number(num_warps):
    """Return the register layout of one number, which every thread has."""
    return gl.BlockedLayout([1], [32], [num_warps], [0])


@gluon.jit
def make_mailbox(READERS: gl.constexpr):
    """Allocate a mailbox for the number of a tile, which so many partitions read."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    number = gl.allocate_shared_memory(gl.int32, [1], layout)
    ready, wanted = make_barriers(1, 1, READERS)
    return number, ready.index(0), wanted.index(0)


@gluon.jit
def dispatch_tiles(mailbox, num_used_ptr, num_n, counter_ptr):
    """Dispatcher, one warp: count tiles and pass their numbers on until there are no more."""
    number, ready, wanted = mailbox
    num_tiles = gl.load(num_used_ptr) * num_n
    tile_id, local_tile = gl.program_id(0), 0
    while tile_id < num_tiles:
        mbarrier.wait(wanted, local_tile & 1)
        before = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        gl.store(counter_ptr, 0, mask=before == num_tiles - 1)
        tile_id = gl.num_programs(0) + before
        number.store(gl.full([1], tile_id, gl.int32, _one_number(1)))
        mbarrier.arrive(ready)
        local_tile += 1


@gluon.jit
def want_tile(mailbox, pred=True):
    """Arrive at "wanted" if pred: the reader has read the number of this tile.

    Each reader calls it once for each tile.
    """
    mbarrier.arrive(mailbox[2], pred=pred)


@gluon.jit
def next_tile(mailbox, local_tile):
    """Wait until the number of the program's next tile is in the mailbox, and return that number.

    local_tile: how many tiles the program has begun before the present one. The readers call it.
    """
    number, ready, _wanted = mailbox
    mbarrier.wait(ready, local_tile & 1)
    return gl.max(number.load(_one_number(gl.num_warps())), 0)
