"""Dispersion and scale (C, D) over tokens sorted by cluster (ops/sort/triton/sort.py).

A program owns a block of features of one chunk (up to ROWS tokens) of one cluster. Most clusters
are one chunk: the program computes the mean, then the deviations from it, while the tokens are
still in the cache. Larger clusters have several chunks, whose sums a launch before computes. The
last program to arrive at a cluster's counter runs the epilogue (epilogue.py): all others have
stored their results by then, and it adds them in a fixed order. Where clusters are small a program
owns all features of a chunk, up to MOST_FEATURES, and runs the epilogue on its own sums.

    sums         multi-chunk clusters only   their tokens read once
    deviations   all clusters                x read once, T D itemsize bytes
Sums run in a fixed order; the only atomic counts arrivals. Sums of 16-bit tokens are exact while a
feature's values share one binade and a chunk has at most 2^16 tokens (bf16; 2^13 in fp16); float32
tokens are summed in float64. So a common offset costs nothing, and equal tokens deviate by exactly
0.

T tokens, D features, C clusters, Q chunks, X slots of sorted tokens. Names such as olmoe are
benchmark shapes (lab/bench/shapes.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2
from acmoe.ops.statistics.triton.dispersion import POISON
from acmoe.ops.statistics.triton.epilogue import Epilogue, Outputs, cluster_epilogue
from acmoe.ops.statistics.triton.small_clusters import small_deviations

FEWEST_ROWS, MOST_ROWS = 256, 2048  # tokens of a chunk
# Models of few features have few programs. Where an even share exceeds SHORT_ROWS tokens, chunks of
# so many are faster, although most clusters then take a second pass: see `launch_table`. float32
# tokens have no longer chunks, because clusters are rarely even.
NARROW, SHORT_ROWS = 1024, 1024
SMALL = 64  # mean tokens of a cluster up to which a program owns all features of a chunk
MOST_FEATURES = 4096  # features of a program: 8 for each of 512 threads
INT32_LIMIT = 2**31  # element offsets below this fit int32, which takes half the instructions


class Tile(NamedTuple):
    """Tile sizes of one step, and launch options."""

    tokens: int  # BT, per step
    features: int
    num_warps: int
    num_stages: int = 1  # pipeline stages of the loop over steps
    registers: int | None = None

    @property
    def sums(self) -> int:
        """The partial sums per feature, BS: as many as tokens that all threads load at once.

        Each thread loads 8 elements.
        """
        return 8 * 32 * self.num_warps // self.features


def launch_table(dim: int, rows: int, small: bool = False, is_float32: bool = False) -> Tile:
    """Choose the tile: few features per block, so that a chunk stays in cache between both passes.

    Short chunks are bound by latency at their ends: fewer registers allow more programs at once.
    Times of both launches in a CUDA graph of repeated calls (H200): chunks of 512 tokens, as at
    qwen30b, 79 us (83 in steps of 64); chunks of 1024, olmoe, 72 us (82 with 72 registers). Long
    chunks prefetch: 2048, mixtral, 49 us. Narrow models load all of a step at once: 13.8 us at
    switch and 14.7 at swin, which took 15.5 and 15.9 in chunks of 2,048 tokens with 8 warps; and
    25.1 for 64 clusters of 512 tokens with 512 features, 31.3 with 8 warps.

    float32 tokens, as models under autocast have them, prefetch as well. Times with cold caches and
    uneven clusters, in brackets with the tiles of 16-bit tokens: switch 31.6 us (47.2), swin 33.4
    (49.5), olmoe 127 (217), mixtral 81.5 (88.5).

    small: clusters have SMALL tokens or fewer on average. 128 tokens a step would be mostly absent
    ones, and dim / 64 programs a cluster would each look it up among all.
    """
    if small and dim >= 1024:
        features = min(MOST_FEATURES, next_power_of_2(dim))
        return Tile(8, features, features // 256)
    if is_float32:
        return Tile(128, 32, 4, 3)
    if dim < NARROW:
        return Tile(512, 32, 4, 1, 128) if rows <= SHORT_ROWS else Tile(512, 32, 8, 1, 80)
    if rows <= 512:
        return Tile(128, 64, 4, 1, 64)
    return Tile(128, 64, 4, 1, 96) if rows <= 1024 else Tile(64, 64, 4, 3)


def chunk_rows(num_tokens: int, num_clusters: int, dim: int, is_float32: bool) -> int:
    """Return the tokens per chunk: twice an even share, so that few clusters need a second chunk.

    float32 tokens, and many 16-bit tokens of fewer than NARROW features, have more chunks. The
    result does not depend on the device: chunks decide the order of additions.
    """
    target = next_power_of_2(max(1, 2 * num_tokens // num_clusters))
    shortens = is_float32 or (dim < NARROW and target > MOST_ROWS)
    return max(FEWEST_ROWS, min(MOST_ROWS, SHORT_ROWS if shortens else target, target))


def most_chunks(num_tokens: int, num_clusters: int, rows: int) -> int:
    """Upper bound on chunks: each cluster may be empty or end in a partial chunk."""
    return cdiv(num_tokens, rows) + num_clusters


class SortedTokens(NamedTuple):
    """Tokens sorted by cluster (ops/sort/triton/sort.py), and the measure to compute."""

    x: Tensor  # (T, D)
    token: Tensor  # (X,) int32 token of each slot
    begin: Tensor  # (C + 1,) int32 first slot of each cluster
    end: Tensor  # (C + 1,) int32 slot after its last token
    measure: str  # mad or square


def measure_sorted(sorted_tokens: SortedTokens, outputs: Outputs, epilogue: Epilogue) -> None:
    """Measure the clusters, and run the epilogue (epilogue.py)."""
    x_TD, token_X, begin, end, measure = sorted_tokens
    T, D = x_TD.shape
    C = begin.numel() - 1
    is_float32 = x_TD.dtype == torch.float32
    rows = chunk_rows(T, C, D, is_float32)
    small = T <= SMALL * C
    tile = launch_table(D, rows, small, is_float32)
    Q = most_chunks(T, C, rows)
    spread_QD = outputs.dispersion.new_empty(Q, D)
    sums_QD = torch.empty_like(spread_QD, dtype=torch.float64 if is_float32 else torch.float32)
    arrivals_C = begin.new_empty(C)
    tokens = x_TD.contiguous(), token_X, begin, end
    # Consecutive programs read neighbouring features of the same tokens.
    grid = cdiv(D, tile.features), Q
    shape = {"BT": tile.tokens, "BS": tile.sums, "BD": tile.features, "STAGES": tile.num_stages}
    shape |= {"ROWS": rows, "IS_FLOAT32": is_float32, "INT64": T * D >= INT32_LIMIT}
    shape["BC"] = max(16, next_power_of_2(C))
    shape["num_warps"] = tile.num_warps
    launch(_sums_kernel, grid, *tokens, sums_QD, arrivals_C, D, C, **shape)
    launch(
        _deviations_kernel, grid, *tokens, sums_QD, arrivals_C, spread_QD, *outputs, D, C,
        *epilogue.numbers, MEASURE=measure, **epilogue.flags,
        WIDTH=max(16, next_power_of_2(D)), WHOLE=tile.features >= D,
        FEW=small and tile.sums == 1 and not is_float32, EXACT=D % tile.features == 0,
        maxnreg=None if is_float32 else tile.registers, **shape,
    )  # fmt: skip


@triton.jit
def _find_chunk(begin_ptr, end_ptr, C, ROWS: tl.constexpr, BC: tl.constexpr):
    """Return this program's cluster, its begin and end slot, its first chunk and its chunk count.

    The chunk count is 0 for programs after the last chunk.
    """
    c = tl.arange(0, BC)
    begin = tl.load(begin_ptr + c, mask=c < C, other=0)
    end = tl.load(end_ptr + c, mask=c < C, other=0)
    # An empty cluster has one chunk, whose program stores its count of 0.
    chunks = tl.where(c < C, tl.maximum((end - begin + ROWS - 1) // ROWS, 1), 0)
    chunk_ends = tl.cumsum(chunks, axis=0)
    cluster = tl.sum((chunk_ends <= tl.program_id(1)).to(tl.int32))
    is_cluster = c == cluster
    begin, end = tl.sum(tl.where(is_cluster, begin, 0)), tl.sum(tl.where(is_cluster, end, 0))
    first_chunk = tl.sum(tl.where(is_cluster, chunk_ends - chunks, 0))
    return cluster, begin, end, first_chunk, tl.sum(tl.where(is_cluster, chunks, 0))


@triton.jit
def _load(x_ptr, token_ptr, start, stop, d, D, INT64: tl.constexpr, BT: tl.constexpr):
    """Load the (BT, BD) tokens of slots start to start + BT; zeros from `stop` on."""
    slot = start + tl.arange(0, BT)
    t = tl.load(token_ptr + slot, mask=slot < stop, other=0)[:, None]
    offs = (t.to(tl.int64) if INT64 else t) * D + d[None, :]
    return tl.load(x_ptr + offs, mask=(slot < stop)[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def _reduce_rows(x, BS: tl.constexpr):
    """Reduce (BT, BD) to (BS, BD) within each thread, to hold fewer accumulators."""
    return tl.sum(x.reshape(x.shape[0] // BS, BS, x.shape[1]), axis=0)


@triton.jit
def _sum(
    x_ptr, token_ptr, first, stop, d, D, IS_FLOAT32: tl.constexpr, INT64: tl.constexpr,
    STAGES: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return the (BD,) sum of the tokens in slots first to stop."""
    dtype: tl.constexpr = tl.float64 if IS_FLOAT32 else tl.float32
    acc = tl.zeros((BS, BD), dtype=dtype)
    for start in tl.range(first, stop, BT, num_stages=STAGES):
        x = _load(x_ptr, token_ptr, start, stop, d, D, INT64, BT)
        acc += _reduce_rows(x.to(dtype), BS)
    return tl.sum(acc, axis=0)


@triton.jit
def _deviations(
    x_ptr, token_ptr, first, stop, d, D, mean, MEASURE: tl.constexpr, INT64: tl.constexpr,
    STAGES: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return the (BD,) sum of |x - mean| or (x - mean)^2 over slots first to stop."""
    acc = tl.zeros((BS, BD), dtype=tl.float32)
    for start in tl.range(first, stop, BT, num_stages=STAGES):
        x = _load(x_ptr, token_ptr, start, stop, d, D, INT64, BT).to(tl.float32)
        # Multiply instead of tl.where: predicate registers are so few that loads would serialise.
        # 0 * mean is NaN only where real tokens make the feature's sum non-finite anyway.
        in_chunk = (start + tl.arange(0, BT) < stop).to(tl.float32)
        deviation = x - mean[None, :] * in_chunk[:, None]
        acc += _reduce_rows(tl.abs(deviation) if MEASURE == "mad" else deviation * deviation, BS)
    return tl.sum(acc, axis=0)


@triton.jit
def _sums_kernel(
    x_ptr, token_ptr, begin_ptr, end_ptr, sums_ptr, arrivals_ptr, D, C, ROWS: tl.constexpr,
    IS_FLOAT32: tl.constexpr, INT64: tl.constexpr, STAGES: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum the chunks of multi-chunk clusters, and zero the arrival counters."""
    chunk = tl.program_id(1)
    if (tl.program_id(0) == 0) & (chunk == 0):
        c = tl.arange(0, BC)
        tl.store(arrivals_ptr + c, tl.zeros((BC,), dtype=tl.int32), mask=c < C)
    _, begin, end, first_chunk, chunks = _find_chunk(begin_ptr, end_ptr, C, ROWS, BC)
    if chunks > 1:
        d = tl.program_id(0) * BD + tl.arange(0, BD)
        first = begin + (chunk - first_chunk) * ROWS
        stop = tl.minimum(first + ROWS, end)
        acc = _sum(x_ptr, token_ptr, first, stop, d, D, IS_FLOAT32, INT64, STAGES, BT, BS, BD)
        tl.store(sums_ptr + chunk * D + d, acc, mask=d < D)


@triton.jit
def _deviations_kernel(
    x_ptr, token_ptr, begin_ptr, end_ptr, sums_ptr, arrivals_ptr, spread_ptr, dispersion_ptr,
    count_ptr, out_ptr, pending_ptr, pending_count_ptr, known_ptr, D, C, floor, eps, min_tokens,
    MEASURE: tl.constexpr, ROOT: tl.constexpr, RESULT: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, FEW: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr,
    IS_FLOAT32: tl.constexpr, INT64: tl.constexpr, STAGES: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum each chunk's deviations; the last program of a cluster runs the epilogue.

    WHOLE: a program owns all features, so that the only program of a cluster is also its last.
    FEW: clusters have few 16-bit tokens (small_clusters.py).
    """
    chunk = tl.program_id(1)
    cluster, begin, end, first_chunk, chunks = _find_chunk(begin_ptr, end_ptr, C, ROWS, BC)
    if chunks == 0:
        return
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    first = begin + (chunk - first_chunk) * ROWS
    stop = tl.minimum(first + ROWS, end)
    if FEW and chunks == 1:
        spread = small_deviations(
            x_ptr, token_ptr, begin, end, d, D, MEASURE, EXACT, INT64, BT, BD
        )  # fmt: skip
    else:
        # float64, so that the mean of equal tokens is exactly their value.
        if chunks == 1:
            acc = _sum(x_ptr, token_ptr, first, stop, d, D, IS_FLOAT32, INT64, STAGES, BT, BS, BD)
            mean = acc.to(tl.float64)
        else:
            mean = _reduce_partials(sums_ptr, first_chunk, chunks, d, D)
        mean = (mean * (1.0 / tl.maximum(end - begin, 1).to(tl.float64))).to(tl.float32)
        spread = _deviations(
            x_ptr, token_ptr, first, stop, d, D, mean, MEASURE, INT64, STAGES, BT, BS, BD
        )  # fmt: skip
    # NaN and inf stay in their feature here; epilogue.py extends them to the whole cluster.
    spread = tl.where(spread < POISON, spread, POISON)
    if WHOLE:
        if chunks == 1:
            cluster_epilogue(
                spread.to(tl.float64), end - begin, cluster.to(tl.int64), d, D, dispersion_ptr,
                count_ptr, out_ptr, pending_ptr, pending_count_ptr, known_ptr, floor, eps,
                min_tokens, ROOT, RESULT,
            )  # fmt: skip
            return
    tl.store(spread_ptr + chunk * D + d, spread, mask=d < D)

    tl.debug_barrier()  # all warps have stored before one counts this program as arrived
    before = tl.atomic_add(arrivals_ptr + cluster, 1, sem="acq_rel")
    if before == chunks * tl.num_programs(0) - 1:
        all_d = tl.arange(0, WIDTH)
        cluster_epilogue(
            _reduce_partials(spread_ptr, first_chunk, chunks, all_d, D), end - begin,
            cluster.to(tl.int64), all_d, D, dispersion_ptr, count_ptr, out_ptr, pending_ptr,
            pending_count_ptr, known_ptr, floor, eps, min_tokens, ROOT, RESULT,
        )  # fmt: skip


@triton.jit
def _reduce_partials(part_ptr, first_chunk, chunks, d, D):
    """Add up the partial sums of a cluster's chunks in order, for features d, in float64."""
    acc = tl.zeros(d.shape, dtype=tl.float64)
    for q in tl.range(first_chunk, first_chunk + chunks, loop_unroll_factor=4):  # 4 loads in flight
        # .cg: bypass L1 and read L2, which all multiprocessors share.
        part = tl.load(part_ptr + q * D + d, mask=d < D, other=0.0, cache_modifier=".cg")
        acc += part.to(tl.float64)
    return acc
