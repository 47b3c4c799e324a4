"""Deviations of each cluster from its mean, over tokens sorted by cluster (kernels/order.py).

A program owns a block of features of one chunk of one cluster. A cluster of one chunk, as most are,
needs nobody else: its mean, then the deviations from it, whose tokens are still in the cache. The
chunks of a larger cluster are summed by a launch before.

    sums         larger clusters alone       floor: their tokens read once
    deviations   every cluster               floor: x read once, T D itemsize bytes
Sums run in a fixed order, no atomics. Of 16-bit tokens they are exact while a feature's values
share one binade and a chunk has at most 2^16 tokens (bf16; 2^13 in fp16), and float32 tokens are
summed in float64: a common offset costs nothing, and equal tokens deviate by exactly 0.

T tokens, D features, C clusters, Q chunks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.kernels.dispersion import POISON

FEWEST_ROWS, MOST_ROWS = 256, 2048  # of a chunk
# Eight on each of an H200's 132 multiprocessors hide how long a token takes to arrive. A constant,
# not a property of the device: chunks decide the order of additions.
PROGRAMS = 1056


class Tile(NamedTuple):
    tokens: int
    features: int
    num_warps: int


def launch_table(dim: int) -> Tile:
    """256 bytes of a row of 16-bit features at once; narrow models have too few such blocks.

    The fastest of eight: both passes 87 us at olmoe, 15 at switch (H200).
    """
    return Tile(32, 128, 4) if dim >= 1024 else Tile(64, 32, 2)


def chunk_rows(num_tokens: int, num_clusters: int, blocks: int) -> int:
    """Twice an even share, so that a cluster seldom needs a second chunk, if that keeps all busy.

    blocks: of features. A cluster that holds every token has chunks enough in any case.
    """
    rows = min(MOST_ROWS, triton.next_power_of_2(max(1, 2 * num_tokens // num_clusters)))
    while rows > FEWEST_ROWS and most_chunks(num_tokens, num_clusters, rows) * blocks < PROGRAMS:
        rows //= 2
    return max(FEWEST_ROWS, rows)


def most_chunks(num_tokens: int, num_clusters: int, rows: int) -> int:
    """Every cluster may end in a chunk that is not full."""
    return triton.cdiv(num_tokens, rows) + num_clusters


class Chunks(NamedTuple):
    """What the launches leave behind for kernels/scale.py."""

    spread: Tensor  # (Q, D) float32 sums of the measure's terms, by cluster and then by chunk
    begin: Tensor  # (C + 1,) int32 places of sorted tokens
    end: Tensor
    rows: int  # of a chunk


def chunk_sums(x_TD: Tensor, token_X: Tensor, begin: Tensor, end: Tensor, measure: str) -> Chunks:
    """measure: mad, or square."""
    T, D = x_TD.shape
    C = begin.numel() - 1
    tile = launch_table(D)
    blocks = triton.cdiv(D, tile.features)
    rows = chunk_rows(T, C, blocks)
    Q = most_chunks(T, C, rows)
    wide = x_TD.dtype == torch.float32
    spread_QD = x_TD.new_empty(Q, D, dtype=torch.float32)
    sums_QD = x_TD.new_empty(Q, D, dtype=torch.float64 if wide else torch.float32)
    tokens = x_TD.contiguous(), token_X, begin, end
    grid = Q, blocks
    shape = {"BT": tile.tokens, "BD": tile.features, "BC": max(16, triton.next_power_of_2(C))}
    shape |= {"ROWS": rows, "WIDE": wide, "num_warps": tile.num_warps}
    if T > 0:
        _sums_kernel[grid](*tokens, sums_QD, D, C, **shape)
        _deviations_kernel[grid](*tokens, sums_QD, spread_QD, D, C, MEASURE=measure, **shape)
    return Chunks(spread_QD, begin, end, rows)


@triton.jit
def chunks_before(begin_ptr, end_ptr, cluster, C, ROWS: tl.constexpr, BC: tl.constexpr):
    """How many chunks the clusters before this one have."""
    c = tl.arange(0, BC)
    known = c < tl.minimum(cluster, C)
    size = tl.load(end_ptr + c, mask=known, other=0) - tl.load(begin_ptr + c, mask=known, other=0)
    return tl.sum((size + ROWS - 1) // ROWS)


@triton.jit
def _find(begin_ptr, end_ptr, C, ROWS: tl.constexpr, BC: tl.constexpr):
    """This program's places, the number of its cluster's chunks and tokens, its first chunk."""
    chunk = tl.program_id(0)
    c = tl.arange(0, BC)
    begin = tl.load(begin_ptr + c, mask=c < C, other=0)
    end = tl.load(end_ptr + c, mask=c < C, other=0)
    chunks = (end - begin + ROWS - 1) // ROWS
    after = tl.cumsum(chunks, axis=0)
    here = (after > chunk) & (after - chunks <= chunk)  # nowhere behind the last chunk
    earlier = tl.sum(tl.where(here, after - chunks, 0))
    first = tl.sum(tl.where(here, begin, 0)) + (chunk - earlier) * ROWS
    stop = tl.sum(tl.where(here, end, 0))
    size = tl.sum(tl.where(here, end - begin, 0))
    return first, tl.minimum(first + ROWS, stop), tl.sum(tl.where(here, chunks, 0)), size, earlier


@triton.jit
def _load(x_ptr, token_ptr, start, stop, d, D, BT: tl.constexpr):
    """(BT, BD) tokens at these places, zeros behind the last, and which there are."""
    place = start + tl.arange(0, BT)
    t = tl.load(token_ptr + place, mask=place < stop, other=0).to(tl.int64)
    known = (place < stop)[:, None] & (d[None, :] < D)
    return tl.load(x_ptr + t[:, None] * D + d[None, :], mask=known, other=0.0), known


@triton.jit
def _sum(
    x_ptr, token_ptr, first, stop, d, D, WIDE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.zeros((BT, BD), dtype=dtype)
    for start in range(first, stop, BT):
        x, _ = _load(x_ptr, token_ptr, start, stop, d, D, BT)
        total += x.to(dtype)
    return tl.sum(total, axis=0)


@triton.jit
def _sums_kernel(
    x_ptr, token_ptr, begin_ptr, end_ptr, sums_ptr, D, C, ROWS: tl.constexpr, WIDE: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    first, stop, chunks, _, _ = _find(begin_ptr, end_ptr, C, ROWS, BC)
    if chunks > 1:
        d = tl.program_id(1) * BD + tl.arange(0, BD)
        total = _sum(x_ptr, token_ptr, first, stop, d, D, WIDE, BT, BD)
        tl.store(sums_ptr + tl.program_id(0) * D + d, total, mask=d < D)


@triton.jit
def _deviations_kernel(
    x_ptr, token_ptr, begin_ptr, end_ptr, sums_ptr, spread_ptr, D, C, MEASURE: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    first, stop, chunks, size, earlier = _find(begin_ptr, end_ptr, C, ROWS, BC)
    if chunks == 0:
        return
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    # float64, so that tokens that are all equal have exactly their own value for a mean.
    mean = tl.zeros((BD,), dtype=tl.float64)
    if chunks == 1:
        mean += _sum(x_ptr, token_ptr, first, stop, d, D, WIDE, BT, BD).to(tl.float64)
    else:
        for q in range(earlier, earlier + chunks):
            part = tl.load(sums_ptr + q * D + d, mask=d < D, other=0.0)
            mean += part.to(tl.float64)
    mean = (mean * (1.0 / size.to(tl.float64))).to(tl.float32)
    total = tl.zeros((BT, BD), dtype=tl.float32)
    for start in range(first, stop, BT):
        x, known = _load(x_ptr, token_ptr, start, stop, d, D, BT)
        away = x.to(tl.float32) - mean[None, :]
        term = tl.abs(away) if MEASURE == "mad" else away * away
        total += tl.where(known, term, 0.0)
    total = tl.sum(total, axis=0)
    # NaN and inf stay in their feature, and are told to the whole cluster by kernels/scale.py.
    total = tl.where(total < POISON, total, POISON)
    tl.store(spread_ptr + tl.program_id(0) * D + d, total, mask=d < D)
