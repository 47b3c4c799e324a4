"""Dispersion and scale of each cluster, over tokens sorted by cluster (ops/sort/triton/sort.py).

A program owns a block of features of one chunk of one cluster. A cluster of one chunk, as most are,
needs nobody else: its mean, then the deviations from it, whose tokens are still in the cache. The
chunks of a larger cluster are summed by a launch before. Whichever program of a cluster comes last
finishes it (epilogue.py): all have written by then, and it adds what they wrote in order.

    sums         larger clusters alone       floor: their tokens read once
    deviations   every cluster               floor: x read once, T D itemsize bytes
Sums run in a fixed order; the one atomic counts arrivals. Of 16-bit tokens they are exact while a
feature's values share one binade and a chunk has at most 2^16 tokens (bf16; 2^13 in fp16), and
float32 tokens are summed in float64: a common offset costs nothing, and equal tokens deviate by
exactly 0.

T tokens, D features, C clusters, Q chunks, X sorted places.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.statistics.triton.dispersion import POISON
from acmoe.ops.statistics.triton.epilogue import finish_cluster

FEWEST_ROWS, MOST_ROWS = 256, 2048  # of a chunk
SHORT = 2**31  # offsets below this fit int32: half the instructions


class Tile(NamedTuple):
    tokens: int  # of a step
    features: int
    num_warps: int
    num_stages: int = 1  # loads of a step that are under way
    registers: int | None = None

    @property
    def sums(self) -> int:
        """Of a feature, under way: tokens that all threads load at once, 8 numbers each."""
        return 8 * 32 * self.num_warps // self.features


def launch_table(dim: int, rows: int) -> Tile:
    """Blocks of few features: a chunk's tokens stay in the cache between the two passes over them.

    Short chunks are waited for at their ends: more programs at once, by fewer registers. Both
    launches in a graph of calls in a row (H200): chunks of 512 tokens, as at qwen30b, 79 us (83 in
    steps of 64); of 1024, olmoe, 72 (82 with 72 registers). Long ones load ahead: of 2048, mixtral,
    49. A narrow model's load all of a step at once: 14.2 at switch, 15.7 at swin (15.6 and 17.5 in
    blocks of 16 features; with half of the tokens in one cluster 17.9 and 22.5).
    """
    if dim < 1024:
        return Tile(512, 32, 8, 1, 80)
    if rows <= 512:
        return Tile(128, 64, 4, 1, 64)
    return Tile(128, 64, 4, 1, 96) if rows <= 1024 else Tile(64, 64, 4, 3)


def chunk_rows(num_tokens: int, num_clusters: int) -> int:
    """Twice an even share, so that a cluster seldom needs a second chunk.

    Of shapes alone, not of the device: chunks decide the order of additions.
    """
    even = triton.next_power_of_2(max(1, 2 * num_tokens // num_clusters))
    return max(FEWEST_ROWS, min(MOST_ROWS, even))


def most_chunks(num_tokens: int, num_clusters: int, rows: int) -> int:
    """Every cluster may end in a chunk that is not full, or be empty."""
    return triton.cdiv(num_tokens, rows) + num_clusters


class SortedTokens(NamedTuple):
    """What is measured, and how: tokens by cluster, as ops/sort/triton/sort.py leaves them."""

    x: Tensor  # (T, D)
    token: Tensor  # (X,) int32 token at each place
    begin: Tensor  # (C + 1,) int32 places of sorted tokens
    end: Tensor
    measure: str  # mad, or square


def measure_sorted(
    sorted_tokens: SortedTokens,
    dispersion_CD: Tensor,
    count_C: Tensor,
    out: Tensor,
    *,
    root: bool,
    result: str,
    floor: float,
    eps: float,
    min_tokens: int,
) -> None:
    """Write dispersion and count, and into `out` what `result` names (epilogue.py)."""
    x_TD, token_X, begin, end, measure = sorted_tokens
    T, D = x_TD.shape
    C = begin.numel() - 1
    rows = chunk_rows(T, C)
    tile = launch_table(D, rows)
    Q = most_chunks(T, C, rows)
    wide = x_TD.dtype == torch.float32
    sums_QD = dispersion_CD.new_empty(Q, D, dtype=torch.float64 if wide else torch.float32)
    spread_QD = dispersion_CD.new_empty(Q, D)
    arrived_C = begin.new_empty(C)
    tokens = x_TD.contiguous(), token_X, begin, end
    # Neighbours in the grid read neighbouring features of the same tokens.
    grid = triton.cdiv(D, tile.features), Q
    shape = {"BT": tile.tokens, "BS": tile.sums, "BD": tile.features, "STAGES": tile.num_stages}
    shape |= {"ROWS": rows, "WIDE": wide, "LONG": T * D >= SHORT, "num_warps": tile.num_warps}
    shape["BC"] = max(16, triton.next_power_of_2(C))
    _sums_kernel[grid](*tokens, sums_QD, arrived_C, D, C, **shape)
    _deviations_kernel[grid](
        *tokens, sums_QD, arrived_C, spread_QD, dispersion_CD, count_C, out, D, C, floor, eps,
        min_tokens, MEASURE=measure, ROOT=root, RESULT=result,
        WIDTH=max(16, triton.next_power_of_2(D)), maxnreg=None if wide else tile.registers, **shape,
    )  # fmt: skip


@triton.jit
def _find(begin_ptr, end_ptr, C, ROWS: tl.constexpr, BC: tl.constexpr):
    """This program's cluster, and where it begins and ends; its first chunk and all its chunks.

    No chunks behind the last one.
    """
    c = tl.arange(0, BC)
    begin = tl.load(begin_ptr + c, mask=c < C, other=0)
    end = tl.load(end_ptr + c, mask=c < C, other=0)
    # One chunk of an empty cluster: somebody has to say that it is empty.
    chunks = tl.where(c < C, tl.maximum((end - begin + ROWS - 1) // ROWS, 1), 0)
    after = tl.cumsum(chunks, axis=0)
    cluster = tl.sum((after <= tl.program_id(1)).to(tl.int32))
    here = c == cluster
    begin, end = tl.sum(tl.where(here, begin, 0)), tl.sum(tl.where(here, end, 0))
    earlier = tl.sum(tl.where(here, after - chunks, 0))
    return cluster, begin, end, earlier, tl.sum(tl.where(here, chunks, 0))


@triton.jit
def _load(x_ptr, token_ptr, start, stop, d, D, LONG: tl.constexpr, BT: tl.constexpr):
    """(BT, BD) tokens at these places, zeros behind the last."""
    place = start + tl.arange(0, BT)
    t = tl.load(token_ptr + place, mask=place < stop, other=0)[:, None]
    at = (t.to(tl.int64) if LONG else t) * D + d[None, :]
    return tl.load(x_ptr + at, mask=(place < stop)[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def _folded(x, BS: tl.constexpr):
    """(BT, BD) to (BS, BD): a thread adds up what it holds, and keeps less of it."""
    return tl.sum(x.reshape(x.shape[0] // BS, BS, x.shape[1]), axis=0)


@triton.jit
def _sum(
    x_ptr, token_ptr, first, stop, d, D, WIDE: tl.constexpr, LONG: tl.constexpr,
    STAGES: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.zeros((BS, BD), dtype=dtype)
    for start in tl.range(first, stop, BT, num_stages=STAGES):
        x = _load(x_ptr, token_ptr, start, stop, d, D, LONG, BT)
        total += _folded(x.to(dtype), BS)
    return tl.sum(total, axis=0)


@triton.jit
def _deviations(
    x_ptr, token_ptr, first, stop, d, D, mean, MEASURE: tl.constexpr, LONG: tl.constexpr,
    STAGES: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BS, BD), dtype=tl.float32)
    for start in tl.range(first, stop, BT, num_stages=STAGES):
        x = _load(x_ptr, token_ptr, start, stop, d, D, LONG, BT).to(tl.float32)
        # A factor, not a choice: predicates are so few that the loads would wait for each other.
        # 0 * mean is NaN only where tokens that are there make the feature's sum not finite anyway.
        there = (start + tl.arange(0, BT) < stop).to(tl.float32)
        away = x - mean[None, :] * there[:, None]
        total += _folded(tl.abs(away) if MEASURE == "mad" else away * away, BS)
    return tl.sum(total, axis=0)


@triton.jit
def _sums_kernel(
    x_ptr, token_ptr, begin_ptr, end_ptr, sums_ptr, arrived_ptr, D, C, ROWS: tl.constexpr,
    WIDE: tl.constexpr, LONG: tl.constexpr, STAGES: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    if (tl.program_id(0) == 0) & (chunk == 0):
        c = tl.arange(0, BC)
        tl.store(arrived_ptr + c, tl.zeros((BC,), dtype=tl.int32), mask=c < C)
    _, begin, end, earlier, chunks = _find(begin_ptr, end_ptr, C, ROWS, BC)
    if chunks > 1:
        d = tl.program_id(0) * BD + tl.arange(0, BD)
        first = begin + (chunk - earlier) * ROWS
        stop = tl.minimum(first + ROWS, end)
        total = _sum(x_ptr, token_ptr, first, stop, d, D, WIDE, LONG, STAGES, BT, BS, BD)
        tl.store(sums_ptr + chunk * D + d, total, mask=d < D)


@triton.jit
def _deviations_kernel(
    x_ptr, token_ptr, begin_ptr, end_ptr, sums_ptr, arrived_ptr, spread_ptr, dispersion_ptr,
    count_ptr, out_ptr, D, C, floor, eps, min_tokens, MEASURE: tl.constexpr, ROOT: tl.constexpr,
    RESULT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    LONG: tl.constexpr, STAGES: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    cluster, begin, end, earlier, chunks = _find(begin_ptr, end_ptr, C, ROWS, BC)
    if chunks == 0:
        return
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    first = begin + (chunk - earlier) * ROWS
    stop = tl.minimum(first + ROWS, end)
    # float64, so that tokens that are all equal have exactly their own value for a mean.
    if chunks == 1:
        total = _sum(x_ptr, token_ptr, first, stop, d, D, WIDE, LONG, STAGES, BT, BS, BD)
        mean = total.to(tl.float64)
    else:
        mean = _total(sums_ptr, earlier, chunks, d, D)
    mean = (mean * (1.0 / tl.maximum(end - begin, 1).to(tl.float64))).to(tl.float32)
    spread = _deviations(
        x_ptr, token_ptr, first, stop, d, D, mean, MEASURE, LONG, STAGES, BT, BS, BD
    )  # fmt: skip
    # NaN and inf stay in their feature, and are told to the whole cluster by epilogue.py.
    spread = tl.where(spread < POISON, spread, POISON)
    tl.store(spread_ptr + chunk * D + d, spread, mask=d < D)

    tl.debug_barrier()  # every warp has written before one says that this program has arrived
    before = tl.atomic_add(arrived_ptr + cluster, 1, sem="acq_rel")
    if before == chunks * tl.num_programs(0) - 1:
        every = tl.arange(0, WIDTH)
        finish_cluster(
            _total(spread_ptr, earlier, chunks, every, D), end - begin, cluster.to(tl.int64), every,
            D, dispersion_ptr, count_ptr, out_ptr, floor, eps, min_tokens, ROOT, RESULT,
        )  # fmt: skip


@triton.jit
def _total(part_ptr, earlier, chunks, d, D):
    """Features d of what a cluster's chunks have written, added up in order."""
    total = tl.zeros(d.shape, dtype=tl.float64)
    for q in tl.range(earlier, earlier + chunks, loop_unroll_factor=4):  # 4 loads under way
        # .cg: from the cache that all multiprocessors share.
        part = tl.load(part_ptr + q * D + d, mask=d < D, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float64)
    return total
