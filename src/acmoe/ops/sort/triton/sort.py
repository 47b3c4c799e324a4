"""Sort routed rows by expert, and tokens by cluster: a stable counting sort in three launches.

    count    histogram (E, blocks): the rows of each block that go to each expert
    offset   exclusive prefix sum of each expert's counts over the blocks, one program an expert
    place    position of a row = first position of its expert + offset of its block there + rank in
             the block; writes permutation, inverse, offsets and sorted experts
There are no atomics, so that the result is deterministic. The same launches sort the tokens by
cluster with additional programs, because a launch costs more than that sort. These programs come
first, since the first of them also writes the begin and end of each cluster and fills the padding.
Up to FEW_ROWS rows, without tokens, are sorted by one launch instead (sort_few.py). A block is
`steps` times R rows: a program compares R rows with all experts at once, and many experts leave
registers for few rows, but every block writes and reads one number for each expert.

The sorted tokens of a cluster begin at a multiple of ALIGNMENT positions, so that a tile of that
height holds tokens of one cluster and loads one scale vector; -1 fills the padding. (Many small
clusters begin where the one before ends: `alignment` in ops/sort/order.py.)

N = T * K rows, T tokens, E experts; the id E means "no expert" and sorts last. There are C = E
clusters; any other id means "no cluster" and sorts last too. X positions of sorted tokens. Memory
traffic: N ids are read twice and three arrays of N written; T ids are read twice and X written
once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2
from acmoe.ops.sort.order import TokenOrder, alignment, no_order
from acmoe.ops.sort.triton.sort_few import sort_few

MOST_STEPS = 8  # steps of a block, of R rows each
FEWEST_BLOCKS = 512  # this many keep a GPU busy
# Rows that are compared with each other instead, in one launch: on an H200, in a CUDA graph, 1,024
# rows take 3.4 us against 7.0 in three launches, 4,096 rows 8.4 against 8.2.
FEW_ROWS = 2048


def sort_rows(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort the N = T * K routed rows by expert; return int64 tensors.

    permutation (N,): the row t * K + k at each sorted position; inverse (N,): the sorted position
    of each row; offsets (E,): the end of each expert's rows; expert (N,): the sorted expert ids.
    """
    return sort_rows_and_tokens(expert_ids_TK, None, num_experts)[0]


def sort_rows_and_tokens(
    expert_ids_TK: Tensor, cluster_T: Tensor | None, num_experts: int
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the results of `sort_rows` and, if clusters are given, the packed `TokenOrder`."""
    ids = expert_ids_TK.reshape(-1)
    N, T = ids.numel(), 0 if cluster_T is None else cluster_T.numel()
    # The keys of sort_few are int32.
    if cluster_T is None and N <= FEW_ROWS and (num_experts + 1) * N < 2**31:
        return sort_few(ids, num_experts), no_order(ids)
    num_bins = max(16, next_power_of_2(num_experts))
    rows = max(16, min(128, 16384 // num_bins))
    steps = steps_of(N, rows)
    row_blocks = max(1, cdiv(N, rows * steps))
    token_blocks = 0 if cluster_T is None else max(1, cdiv(T, rows * steps))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=ids.device)

    count, total = empty(num_experts * (row_blocks + token_blocks)), empty(2 * num_experts)
    block_offset = torch.empty_like(count)
    offsets = empty(num_experts, dtype=torch.int64)
    permutation, inverse, expert = (empty(N, dtype=torch.int64) for _ in range(3))
    packed, sorted_tokens = no_order(ids), TokenOrder(empty(0), empty(0), empty(0))
    if cluster_T is not None:
        packed, sorted_tokens = TokenOrder.new(T, num_experts, ids.device)
    num_positions = sorted_tokens.token.numel()
    ids_and_clusters = ids, ids if cluster_T is None else cluster_T
    sizes = N, T, num_experts, row_blocks, token_blocks
    block = {"R": rows, "S": steps, "BE": num_bins, "num_warps": 4}
    grid = (row_blocks + token_blocks,)
    launch(_count_kernel, grid, *ids_and_clusters, count, *sizes, **block)
    launch(
        *(_offset_kernel, (num_experts * (1 if cluster_T is None else 2),)),
        *(count, block_offset, total, num_experts, row_blocks, token_blocks),
        BB=1024,
        num_warps=4,
    )
    launch(
        _place_kernel, grid, *ids_and_clusters, block_offset, total, offsets, permutation, inverse,
        expert, *sorted_tokens, *sizes, num_positions, ALIGNMENT=alignment(T, num_experts),
        **block,
    )  # fmt: skip
    return (permutation, inverse, offsets, expert), packed


def steps_of(num_rows: int, rows: int) -> int:
    """Return the steps of a block: several only if a step has at most 64 rows.

    At least FEWEST_BLOCKS blocks remain, which keep a GPU busy.
    """
    most = 1 if rows > 64 else MOST_STEPS
    return max(1, min(most, num_rows // (rows * FEWEST_BLOCKS)))


@triton.jit
def _count_kernel(
    ids_ptr, cluster_ptr, count_ptr, N, T, E, row_blocks, token_blocks, R: tl.constexpr,
    S: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Write the histograms (E, row_blocks) of the rows and (C, token_blocks) of the tokens."""
    block = tl.program_id(0)
    if block < token_blocks:
        _count(cluster_ptr, count_ptr + E * row_blocks, block, T, E, token_blocks, R, S, BE)
    else:
        _count(ids_ptr, count_ptr, block - token_blocks, N, E, row_blocks, R, S, BE)


@triton.jit
def _count(
    ids_ptr, count_ptr, block, num_rows, E, num_blocks, R: tl.constexpr, S: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Write the histogram of one block of S * R ids to column `block` of count (E, num_blocks)."""
    bins = tl.arange(0, BE)
    total = tl.zeros((BE,), dtype=tl.int32)
    for step in range(0, S):
        rows = (block * S + step) * R + tl.arange(0, R)
        ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1).to(tl.int32)
        total += tl.sum((ids[:, None] == bins[None, :]).to(tl.int32), axis=0)
    tl.store(count_ptr + bins * num_blocks + block, total, mask=bins < E)


@triton.jit
def _offset_kernel(
    count_ptr, block_offset_ptr, total_ptr, E, row_blocks, token_blocks, BB: tl.constexpr
):
    """Write the exclusive prefix sum over blocks, and the total, of one expert or cluster."""
    row = tl.program_id(0)  # experts, then clusters
    num_blocks = tl.where(row < E, row_blocks, token_blocks)
    base = tl.where(row < E, row * row_blocks, E * row_blocks + (row - E) * token_blocks)
    total = 0
    for start in range(0, num_blocks, BB):
        at = start + tl.arange(0, BB)
        inside = at < num_blocks
        count = tl.load(count_ptr + base + at, mask=inside, other=0)
        running = tl.cumsum(count, axis=0)
        tl.store(block_offset_ptr + base + at, total + running - count, mask=inside)
        total += tl.sum(count)
    tl.store(total_ptr + row, total)


@triton.jit
def _place_kernel(
    ids_ptr, cluster_ptr, block_offset_ptr, total_ptr, offsets_ptr, permutation_ptr, inverse_ptr,
    expert_ptr, token_ptr, cluster_begin_ptr, cluster_end_ptr, N, T, E, row_blocks, token_blocks,
    num_positions, ALIGNMENT: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Write the sorted positions of one block of tokens or of rows."""
    block = tl.program_id(0)
    if block < token_blocks:
        _place_tokens(
            cluster_ptr, block_offset_ptr + E * row_blocks, total_ptr + E, token_ptr,
            cluster_begin_ptr, cluster_end_ptr, block, T, E, token_blocks, num_positions, ALIGNMENT,
            R, S, BE,
        )  # fmt: skip
    else:
        _place_rows(
            ids_ptr, block_offset_ptr, total_ptr, offsets_ptr, permutation_ptr, inverse_ptr,
            expert_ptr, block - token_blocks, N, E, row_blocks, R, S, BE,
        )  # fmt: skip


@triton.jit
def _place_rows(
    ids_ptr, block_offset_ptr, total_ptr, offsets_ptr, permutation_ptr, inverse_ptr, expert_ptr,
    block, N, E, num_blocks, R: tl.constexpr, S: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Write permutation, inverse and expert for a block of rows; block 0 also writes offsets."""
    _, end, following, last = _first_positions(
        block_offset_ptr, total_ptr, block, E, num_blocks, 1, S * R, BE
    )
    bins = tl.arange(0, BE)
    if block == 0:
        tl.store(offsets_ptr + bins, end.to(tl.int64), mask=bins < E)
    for step in range(0, S):
        rows = (block * S + step) * R + tl.arange(0, R)
        ids, position, following, last = _place(ids_ptr, rows, following, last, N, E, R, S, BE)
        inside = rows < N
        tl.store(permutation_ptr + position, rows.to(tl.int64), mask=inside)
        tl.store(inverse_ptr + rows, position.to(tl.int64), mask=inside)
        tl.store(expert_ptr + position, ids.to(tl.int64), mask=inside)


@triton.jit
def _place_tokens(
    cluster_ptr, block_offset_ptr, total_ptr, token_ptr, begin_ptr, end_ptr, block, T, C,
    num_blocks, num_positions, ALIGNMENT: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Write the sorted tokens of a block; block 0 also writes begin, end and the padding."""
    begin, end, following, last = _first_positions(
        block_offset_ptr, total_ptr, block, C, num_blocks, ALIGNMENT, S * R, BE
    )
    for step in range(0, S):
        rows = (block * S + step) * R + tl.arange(0, R)
        _, position, following, last = _place(cluster_ptr, rows, following, last, T, C, R, S, BE)
        tl.store(token_ptr + position, rows, mask=rows < T)
    if block == 0:
        _extents(token_ptr, begin_ptr, end_ptr, begin, end, T, C, num_positions, ALIGNMENT, BE)


@triton.jit
def _first_positions(
    block_offset_ptr, total_ptr, block, E, num_blocks, ALIGN: tl.constexpr, SIZE: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Return the bins' begin and end (BE,), and where a block's first row of each bin, or of none,
    goes: (BE,) and a scalar.

    Bins begin at multiples of ALIGN; a block has SIZE rows.
    """
    bins = tl.arange(0, BE)
    total = tl.load(total_ptr + bins, mask=bins < E, other=0)
    padded_total = (total + ALIGN - 1) // ALIGN * ALIGN
    begin = tl.cumsum(padded_total, axis=0) - padded_total
    earlier = tl.load(block_offset_ptr + bins * num_blocks + block, mask=bins < E, other=0)
    # Rows in no bin follow the last bin, in their own order; block * SIZE - sum(earlier) of them
    # are in earlier blocks.
    last = tl.sum(padded_total) + block * SIZE - tl.sum(earlier)
    return begin, begin + total, begin + earlier, last


@triton.jit
def _place(
    ids_ptr, rows, following, last, num_rows, E, R: tl.constexpr, S: tl.constexpr, BE: tl.constexpr
):
    """Return ids and sorted positions (R,) of rows, and where the next row of each bin goes.

    following (BE,), last: where the first of these rows in each bin, or in none, goes.
    """
    i = tl.arange(0, R)
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1).to(tl.int32)
    bin_id = tl.where((ids >= 0) & (ids < E), ids, -1)
    first = tl.where(bin_id >= 0, tl.gather(following, tl.maximum(bin_id, 0), 0), last)
    # The rank among these rows: count equal ids before, an (R, R) comparison. A prefix sum over
    # one-hot rows (R, BE) would need more registers.
    same_earlier = (bin_id[:, None] == bin_id[None, :]) & (i[:, None] < i[None, :])
    position = first + tl.sum(same_earlier.to(tl.int32), axis=0)
    if S > 1:
        bins = tl.arange(0, BE)
        following += tl.sum((bin_id[:, None] == bins[None, :]).to(tl.int32), axis=0)
        last += tl.sum((bin_id < 0).to(tl.int32))
    return ids, position, following, last


@triton.jit
def _extents(
    token_ptr, begin_ptr, end_ptr, begin, end, T, C, num_positions, ALIGNMENT: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Write begin and end (C + 1,) of the clusters, and -1 in the padding of token (X,)."""
    c = tl.arange(0, BE)
    valid = c < C
    tl.store(begin_ptr + c, begin, mask=valid)
    tl.store(end_ptr + c, end, mask=valid)
    limit = (end + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    after_bins = tl.max(tl.where(valid, limit, 0))
    last_end = after_bins + T - tl.sum(tl.where(valid, end - begin, 0))
    tl.store(begin_ptr + C, after_bins)
    tl.store(end_ptr + C, last_end)
    for start in range(0, ALIGNMENT, 8):
        at = end[None, :] + start + tl.arange(0, 8)[:, None]
        padding = tl.full((8, BE), -1, dtype=tl.int32)
        tl.store(token_ptr + at, padding, mask=valid[None, :] & (at < limit[None, :]))
    for start in range(last_end, num_positions, 1024):
        at = start + tl.arange(0, 1024)
        tl.store(token_ptr + at, tl.full((1024,), -1, dtype=tl.int32), mask=at < num_positions)
