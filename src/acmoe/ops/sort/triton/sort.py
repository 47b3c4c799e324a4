"""Sort routed rows by expert, and tokens by cluster: a stable counting sort in three launches.

    count    histogram (E, blocks): the rows of each block of R rows that go to each expert
    offset   exclusive prefix sum of each expert's counts over the blocks, one program an expert
    place    position of a row = first position of its expert + offset of its block there + rank in
             the block; writes permutation, inverse, offsets and sorted experts
There are no atomics, so that the result is deterministic. The same launches sort the tokens by
cluster with additional programs, because a launch costs more than that sort. These programs come
first, since the first of them also writes the begin and end of each cluster and fills the padding.
Up to FEW_ROWS rows, without tokens, are sorted by one program of one launch instead.

The sorted tokens of a cluster begin at a multiple of ALIGNMENT positions, so that a tile of that
height holds tokens of one cluster and loads one scale vector; -1 fills the padding.

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
from acmoe.ops.sort.order import ALIGNMENT, TokenOrder, no_order

FEW_ROWS = 512  # rows that one program sorts: the host's time for two more launches is longer


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
    num_bins = max(16, next_power_of_2(num_experts))
    rows = max(16, min(128, 16384 // num_bins))
    if cluster_T is None and N <= FEW_ROWS:
        return _sort_few(ids, num_experts, rows, num_bins), no_order(ids)
    row_blocks = max(1, cdiv(N, rows))
    token_blocks = 0 if cluster_T is None else max(1, cdiv(T, rows))

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
    block = {"R": rows, "BE": num_bins, "num_warps": 4}
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
        expert, *sorted_tokens, *sizes, num_positions, ALIGNMENT=ALIGNMENT, **block,
    )  # fmt: skip
    return (permutation, inverse, offsets, expert), packed


def _sort_few(
    ids: Tensor, num_experts: int, rows: int, num_bins: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return permutation, inverse, offsets and expert of a few rows by one launch."""
    N = ids.numel()
    offsets = torch.empty(num_experts, dtype=torch.int64, device=ids.device)
    permutation, inverse, expert = offsets.new_empty(N), offsets.new_empty(N), offsets.new_empty(N)
    launch(
        *(_sort_few_kernel, (1,), ids, permutation, inverse, expert, offsets, N, num_experts),
        R=rows,
        BE=num_bins,
        num_warps=4,
    )
    return permutation, inverse, offsets, expert


@triton.jit(do_not_specialize=["N"])
def _sort_few_kernel(
    ids_ptr, permutation_ptr, inverse_ptr, expert_ptr, offsets_ptr, N, E, R: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Write the results of `sort_rows` in one program: count all blocks of R rows, then place."""
    i = tl.arange(0, R)
    bins = tl.arange(0, BE)
    total = tl.zeros((BE,), dtype=tl.int32)
    for start in range(0, N, R):
        ids = tl.load(ids_ptr + start + i, mask=start + i < N, other=-1).to(tl.int32)
        total += tl.sum((ids[:, None] == bins[None, :]).to(tl.int32), axis=0)
    total = tl.where(bins < E, total, 0)
    end = tl.cumsum(total, axis=0)
    tl.store(offsets_ptr + bins, end.to(tl.int64), mask=bins < E)
    following = end - total  # the position of each expert's next row
    last = tl.sum(total)  # that of the next row without an expert
    for start in range(0, N, R):
        rows = start + i
        ids = tl.load(ids_ptr + rows, mask=rows < N, other=-1).to(tl.int32)
        bin_id = tl.where((ids >= 0) & (ids < E), ids, -1)
        first = tl.where(bin_id >= 0, tl.gather(following, tl.maximum(bin_id, 0), 0), last)
        same_earlier = (bin_id[:, None] == bin_id[None, :]) & (i[:, None] < i[None, :])
        position = first + tl.sum(same_earlier.to(tl.int32), axis=0)
        tl.store(permutation_ptr + position, rows.to(tl.int64), mask=rows < N)
        tl.store(inverse_ptr + rows, position.to(tl.int64), mask=rows < N)
        tl.store(expert_ptr + position, ids.to(tl.int64), mask=rows < N)
        following += tl.sum((bin_id[:, None] == bins[None, :]).to(tl.int32), axis=0)
        last += tl.sum((bin_id < 0).to(tl.int32))


@triton.jit
def _count_kernel(
    ids_ptr, cluster_ptr, count_ptr, N, T, E, row_blocks, token_blocks, R: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Write the histograms (E, row_blocks) of the rows and (C, token_blocks) of the tokens."""
    block = tl.program_id(0)
    if block < token_blocks:
        _count(cluster_ptr, count_ptr + E * row_blocks, block, T, E, token_blocks, R, BE)
    else:
        _count(ids_ptr, count_ptr, block - token_blocks, N, E, row_blocks, R, BE)


@triton.jit
def _count(ids_ptr, count_ptr, block, num_rows, E, num_blocks, R: tl.constexpr, BE: tl.constexpr):
    """Write the histogram of one block of R ids to column `block` of count (E, num_blocks)."""
    rows = block * R + tl.arange(0, R)
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1).to(tl.int32)
    bins = tl.arange(0, BE)
    hits = (ids[:, None] == bins[None, :]).to(tl.int32)
    tl.store(count_ptr + bins * num_blocks + block, tl.sum(hits, axis=0), mask=bins < E)


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
    num_positions, ALIGNMENT: tl.constexpr, R: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Write the sorted positions of one block of tokens or of rows."""
    block = tl.program_id(0)
    if block < token_blocks:
        _place_tokens(
            cluster_ptr, block_offset_ptr + E * row_blocks, total_ptr + E, token_ptr,
            cluster_begin_ptr, cluster_end_ptr, block, T, E, token_blocks, num_positions, ALIGNMENT,
            R, BE,
        )  # fmt: skip
    else:
        _place_rows(
            ids_ptr, block_offset_ptr, total_ptr, offsets_ptr, permutation_ptr, inverse_ptr,
            expert_ptr, block - token_blocks, N, E, row_blocks, R, BE,
        )  # fmt: skip


@triton.jit
def _place_rows(
    ids_ptr, block_offset_ptr, total_ptr, offsets_ptr, permutation_ptr, inverse_ptr, expert_ptr,
    block, N, E, num_blocks, R: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Write permutation, inverse and expert for a block of rows; block 0 also writes offsets."""
    rows = block * R + tl.arange(0, R)
    ids, position, _, end = _place(
        ids_ptr, block_offset_ptr, total_ptr, block, N, E, num_blocks, 1, R, BE
    )
    bins = tl.arange(0, BE)
    if block == 0:
        tl.store(offsets_ptr + bins, end.to(tl.int64), mask=bins < E)
    inside = rows < N
    tl.store(permutation_ptr + position, rows.to(tl.int64), mask=inside)
    tl.store(inverse_ptr + rows, position.to(tl.int64), mask=inside)
    tl.store(expert_ptr + position, ids.to(tl.int64), mask=inside)


@triton.jit
def _place_tokens(
    cluster_ptr, block_offset_ptr, total_ptr, token_ptr, begin_ptr, end_ptr, block, T, C,
    num_blocks, num_positions, ALIGNMENT: tl.constexpr, R: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Write the sorted tokens of a block; block 0 also writes begin, end and the padding."""
    rows = block * R + tl.arange(0, R)
    _, position, begin, end = _place(
        cluster_ptr, block_offset_ptr, total_ptr, block, T, C, num_blocks, ALIGNMENT, R, BE
    )
    tl.store(token_ptr + position, rows, mask=rows < T)
    if block == 0:
        _extents(token_ptr, begin_ptr, end_ptr, begin, end, T, C, num_positions, ALIGNMENT, BE)


@triton.jit
def _place(
    ids_ptr, block_offset_ptr, total_ptr, block, num_rows, E, num_blocks, ALIGN: tl.constexpr,
    R: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Return a block's ids (R,), their sorted positions (R,), and the bins' begin and end (BE,).

    Bins begin at multiples of ALIGN.
    """
    i = tl.arange(0, R)
    rows = block * R + i
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1).to(tl.int32)
    bins = tl.arange(0, BE)
    total = tl.load(total_ptr + bins, mask=bins < E, other=0)
    padded_total = (total + ALIGN - 1) // ALIGN * ALIGN
    begin = tl.cumsum(padded_total, axis=0) - padded_total
    earlier = tl.load(block_offset_ptr + bins * num_blocks + block, mask=bins < E, other=0)
    # Rows in no bin follow the last bin, in their own order; block * R - sum(earlier) of them are
    # in earlier blocks.
    bin_id = tl.where((ids >= 0) & (ids < E), ids, -1)
    after_bins = tl.sum(padded_total) + block * R - tl.sum(earlier)
    first = tl.where(bin_id >= 0, tl.gather(begin + earlier, tl.maximum(bin_id, 0), 0), after_bins)
    # The rank in the block: count equal ids among earlier rows, an (R, R) comparison. A prefix sum
    # over one-hot rows (R, BE) would need more registers.
    same_earlier = (bin_id[:, None] == bin_id[None, :]) & (i[:, None] < i[None, :])
    position = first + tl.sum(same_earlier.to(tl.int32), axis=0)
    return ids, position, begin, begin + total


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
