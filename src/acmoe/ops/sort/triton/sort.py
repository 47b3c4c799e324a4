"""Sort routed rows by expert, and tokens by cluster: a stable counting sort in three launches.

    count    how many rows of each block go to each expert
    offset   one program an expert: a running sum of its counts over blocks
    place    a row's place: its expert's first one, its block's offset there, its rank in the block
No atomics. The tokens' sort takes more programs of the same launches: a launch costs more than it.
They come first, since the first of them also writes where clusters begin and end, and the gaps.

Sorted tokens of a cluster begin at a multiple of STRETCH places, so that a tile of that height
holds one cluster and finds its scale at one place; -1 fills the gaps.

N rows, T tokens, E experts; the id E is "no expert" and stands last. C = E clusters, any other id
is none, which stands last too. X places of sorted tokens.
Bytes: two reads of N ids, three writes; two reads of T, one write.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 64


class SortedTokens(NamedTuple):
    token: Tensor  # (X,) int32 token at each place, -1 for none
    begin: Tensor  # (C + 1,) int32 first place of each cluster; the last: of tokens in none
    end: Tensor  # (C + 1,) int32 the place behind its last token


def most_places(num_tokens: int, num_clusters: int) -> int:
    """X: each cluster, and the tokens in none, may leave less than a stretch unused."""
    return (-(-num_tokens // STRETCH) + num_clusters) * STRETCH


def sort_rows(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order, back, end and expert, as experts/dispatch.py has them."""
    return sort_rows_and_tokens(expert_ids_TK, None, num_experts)[0]


def sort_rows_and_tokens(
    expert_ids_TK: Tensor, cluster_T: Tensor | None, num_experts: int
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], SortedTokens]:
    """`sort_rows`, and tokens by cluster where those are given."""
    ids = expert_ids_TK.reshape(-1)
    N, T = ids.numel(), 0 if cluster_T is None else cluster_T.numel()
    width = max(16, triton.next_power_of_2(num_experts))
    rows = max(16, min(128, 16384 // width))
    blocks = max(1, triton.cdiv(N, rows))
    more = 0 if cluster_T is None else max(1, triton.cdiv(T, rows))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=ids.device)

    count, total = empty(num_experts * (blocks + more)), empty(2 * num_experts)
    offset = torch.empty_like(count)
    end = empty(num_experts, dtype=torch.int64)
    order, back, expert = (empty(N, dtype=torch.int64) for _ in range(3))
    places = 0 if cluster_T is None else most_places(T, num_experts)
    found = SortedTokens(empty(places), empty(num_experts + 1), empty(num_experts + 1))
    both = ids, ids if cluster_T is None else cluster_T
    sizes = N, T, num_experts, blocks, more
    block = {"R": rows, "BE": width, "num_warps": 4}
    _count_kernel[(blocks + more,)](*both, count, *sizes, **block)
    _offset_kernel[(num_experts * (1 if cluster_T is None else 2),)](
        count, offset, total, num_experts, blocks, more, BB=1024, num_warps=4
    )
    _place_kernel[(blocks + more,)](
        *both, offset, total, end, order, back, expert, *found, *sizes, places,
        STRETCH=STRETCH, **block,
    )  # fmt: skip
    return (order, back, end, expert), found


@triton.jit
def _count_kernel(
    ids_ptr, cluster_ptr, count_ptr, N, T, E, blocks, more, R: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    if block < more:
        _count(cluster_ptr, count_ptr + E * blocks, block, T, E, more, R, BE)
    else:
        _count(ids_ptr, count_ptr, block - more, N, E, blocks, R, BE)


@triton.jit
def _count(ids_ptr, count_ptr, block, num_rows, E, num_blocks, R: tl.constexpr, BE: tl.constexpr):
    rows = block * R + tl.arange(0, R)
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1).to(tl.int32)
    bins = tl.arange(0, BE)
    hits = (ids[:, None] == bins[None, :]).to(tl.int32)
    tl.store(count_ptr + bins * num_blocks + block, tl.sum(hits, axis=0), mask=bins < E)


@triton.jit
def _offset_kernel(count_ptr, offset_ptr, total_ptr, E, blocks, more, BB: tl.constexpr):
    row = tl.program_id(0)  # experts, then clusters
    num_blocks = tl.where(row < E, blocks, more)
    base = tl.where(row < E, row * blocks, E * blocks + (row - E) * more)
    reached = 0
    for start in range(0, num_blocks, BB):
        at = start + tl.arange(0, BB)
        inside = at < num_blocks
        count = tl.load(count_ptr + base + at, mask=inside, other=0)
        running = tl.cumsum(count, axis=0)
        tl.store(offset_ptr + base + at, reached + running - count, mask=inside)
        reached += tl.sum(count)
    tl.store(total_ptr + row, reached)


@triton.jit
def _place_kernel(
    ids_ptr, cluster_ptr, offset_ptr, total_ptr, end_ptr, order_ptr, back_ptr, expert_ptr,
    token_ptr, cluster_begin_ptr, cluster_end_ptr, N, T, E, blocks, more, places,
    STRETCH: tl.constexpr, R: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < more:
        _place_tokens(
            cluster_ptr, offset_ptr + E * blocks, total_ptr + E, token_ptr, cluster_begin_ptr,
            cluster_end_ptr, block, T, E, more, places, STRETCH, R, BE,
        )  # fmt: skip
    else:
        _place_rows(
            ids_ptr, offset_ptr, total_ptr, end_ptr, order_ptr, back_ptr, expert_ptr, block - more,
            N, E, blocks, R, BE,
        )  # fmt: skip


@triton.jit
def _place_rows(
    ids_ptr, offset_ptr, total_ptr, end_ptr, order_ptr, back_ptr, expert_ptr, block, N, E,
    num_blocks, R: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    rows = block * R + tl.arange(0, R)
    ids, place, _, end = _place(ids_ptr, offset_ptr, total_ptr, block, N, E, num_blocks, 1, R, BE)
    bins = tl.arange(0, BE)
    if block == 0:
        tl.store(end_ptr + bins, end.to(tl.int64), mask=bins < E)
    inside = rows < N
    tl.store(order_ptr + place, rows.to(tl.int64), mask=inside)
    tl.store(back_ptr + rows, place.to(tl.int64), mask=inside)
    tl.store(expert_ptr + place, ids.to(tl.int64), mask=inside)


@triton.jit
def _place_tokens(
    cluster_ptr, offset_ptr, total_ptr, token_ptr, begin_ptr, end_ptr, block, T, C, num_blocks,
    places, STRETCH: tl.constexpr, R: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    rows = block * R + tl.arange(0, R)
    _, place, begin, end = _place(
        cluster_ptr, offset_ptr, total_ptr, block, T, C, num_blocks, STRETCH, R, BE
    )
    tl.store(token_ptr + place, rows, mask=rows < T)
    if block == 0:
        _extents(token_ptr, begin_ptr, end_ptr, begin, end, T, C, places, STRETCH, BE)


@triton.jit
def _place(
    ids_ptr, offset_ptr, total_ptr, block, num_rows, E, num_blocks, STEP: tl.constexpr,
    R: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Ids of a block of rows, their places, and where each bin begins and ends.

    Bins begin at multiples of STEP.
    """
    i = tl.arange(0, R)
    rows = block * R + i
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1).to(tl.int32)
    bins = tl.arange(0, BE)
    total = tl.load(total_ptr + bins, mask=bins < E, other=0)
    room = (total + STEP - 1) // STEP * STEP
    begin = tl.cumsum(room, axis=0) - room
    earlier = tl.load(offset_ptr + bins * num_blocks + block, mask=bins < E, other=0)
    # Rows in no bin follow the last one, in order: those of earlier blocks that have none.
    own = tl.where((ids >= 0) & (ids < E), ids, -1)
    outside = tl.sum(room) + block * R - tl.sum(earlier)
    first = tl.where(own >= 0, tl.gather(begin + earlier, tl.maximum(own, 0), 0), outside)
    # Every row beside every earlier one: a sum, where running sums of hits (R, BE) fill registers.
    alike = (own[:, None] == own[None, :]) & (i[:, None] < i[None, :])
    place = first + tl.sum(alike.to(tl.int32), axis=0)
    return ids, place, begin, begin + total


@triton.jit
def _extents(
    token_ptr, begin_ptr, end_ptr, begin, end, T, C, places, STRETCH: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """Where clusters begin and end, and -1 wherever no token stands."""
    c = tl.arange(0, BE)
    known = c < C
    tl.store(begin_ptr + c, begin, mask=known)
    tl.store(end_ptr + c, end, mask=known)
    limit = (end + STRETCH - 1) // STRETCH * STRETCH
    outside = tl.max(tl.where(known, limit, 0))
    reached = outside + T - tl.sum(tl.where(known, end - begin, 0))
    tl.store(begin_ptr + C, outside)
    tl.store(end_ptr + C, reached)
    for start in range(0, STRETCH, 8):
        at = end[None, :] + start + tl.arange(0, 8)[:, None]
        nobody = tl.full((8, BE), -1, dtype=tl.int32)
        tl.store(token_ptr + at, nobody, mask=known[None, :] & (at < limit[None, :]))
    for start in range(reached, places, 1024):
        at = start + tl.arange(0, 1024)
        tl.store(token_ptr + at, tl.full((1024,), -1, dtype=tl.int32), mask=at < places)
