"""Attention to a sliding window with relative positions: the forward, in one pass over the keys.

A query at key position S + i sees the keys j at distances 1 to W before it, and adds its product
with column W - distance of the table. Those products lie skewed in memory: see attention_skew.py.

B streams, H heads, X = B * H, L queries, S keys before them, N = S + L, W distances in reach, P
features of a head (padded to a power of two; keys and values lie padded to a multiple of 16), BM
queries and BN keys of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.attention.triton.output import empty_output, output_places
from acmoe.ops.attention.triton.skew import (
    Band,
    comb,
    geometry,
    score_offsets,
    shifted_tables,
    skewed_scores,
    whole_rows,
)
from acmoe.ops.device.dot import as_number, dot
from acmoe.ops.device.dropout_rng import pair_threshold, paired_column_bits, survives_paired
from acmoe.ops.device.tuning import OVERRIDE, Blocks

LOG2E = 1.4426950408889634


def blocks_for(kernel: str, dtype: torch.dtype, width: int) -> Blocks:
    """Queries and keys of a tile; all `width` features at once."""
    if kernel in OVERRIDE:
        return OVERRIDE[kernel]
    if dtype.itemsize > 2:
        return Blocks(32, 32, width, 4, 2)
    wide = width > 64  # more warps share the registers, fewer copies the shared memory
    stages = 2 if wide or kernel == "attention_queries" else 3
    return Blocks(64, 64, width, 8 if wide else 4, stages)


@triton.jit
def in_window(i, j, S, L, span):
    """Which keys a query sees; none if it is no query. A distance below 1 wraps around to a large
    one, so one comparison asks both."""
    before = tl.where(i < L, S - 1 + i, -1)
    return (before[:, None] - j[None, :]).to(tl.uint32, bitcast=True) < span


@triton.jit
def key_runs(i0, S, L, span, BM: tl.constexpr, BN: tl.constexpr):
    """Where a tile of queries finds its keys; see `as_runs`."""
    start = tl.maximum(S + i0 - span, 0) // BN * BN
    end = S + tl.minimum(i0 + BM, L) - 1
    first = tl.maximum(S + i0 + BM - 1 - span, 0)
    inner = tl.maximum(start, (first + BN - 1) // BN * BN)
    # The last tile of queries may reach beyond them; there every entry is asked.
    outer = tl.where(i0 + BM <= L, (S + i0) // BN * BN, inner)
    return as_runs(start, inner, tl.maximum(inner, outer), end, BN)


@triton.jit
def as_runs(start, inner, outer, end, size: tl.constexpr):
    """Tiles from start to end in two runs: the edges, before inner and from outer on, and the
    middle, where every query sees every key.

    In the middle no entry asks whether it is in the window, which costs as much as its softmax. An
    edge is a tile or two: both share one loop, and wait once for its first tiles. The loops name
    their stages, for then the compiler fetches ahead what is no factor of a product, too: the
    scores of the edges. (H200: the forward takes 544 us, with three loops 560; keys 1,100, and
    1,121.)

    Returns the bounds of both loops, edges in tiles and the middle in places, and, for `place_of`,
    where the edges start and the tiles of the first.
    """
    before = tl.cdiv(tl.maximum(tl.minimum(inner, end) - start, 0), size)
    after = tl.cdiv(tl.maximum(end - outer, 0), size)
    return 0, before + after, inner, outer, start, before


@triton.jit
def place_of(at, runs, size: tl.constexpr, INTERIOR: tl.constexpr):
    """Where the tile of a loop over one of the runs starts: at a multiple of its size."""
    if INTERIOR:
        return at
    _, _, _, outer, start, before = runs
    return tl.where(at < before, start + at * size, outer + (at - before) * size)


@triton.jit
def identity(size: tl.constexpr, dtype: tl.constexpr):
    k = tl.arange(0, size)
    return as_number(k[:, None] == k[None, :], dtype)


@triton.jit
def with_positions(score, eye, INTERIOR: tl.constexpr):
    """A tile of position scores as the float32 numbers a product begins with.

    Times the identity: the matrix units take a factor from shared memory, where the tiles of coming
    rounds are put, and no number passes the registers. Outside the window lies what may be no
    number, which a product would spread.
    """
    if INTERIOR:
        return dot(score, eye, tl.zeros(score.shape, tl.float32))
    return score.to(tl.float32)


@triton.jit
def load_rows(base, first, n, p, num, stride, INTERIOR: tl.constexpr, STORED: tl.constexpr):
    """Features of one head's queries, keys or values: rows n from `first` on, zeros behind the
    STORED first.

    Only the address of the tile moves from round to round of a loop, not the places within it.
    (H200: the forward takes 585 us, with an address computed for every row 622; keys 1,121, and
    1,157.)
    """
    ptrs = base + first.to(tl.int64) * stride + (n[:, None] * stride + p[None, :])
    if INTERIOR and p.shape[0] == STORED:
        return tl.load(ptrs)
    if INTERIOR:
        return tl.load(ptrs, mask=(p < STORED)[None, :], other=0.0)
    return tl.load(ptrs, mask=(first + n < num)[:, None] & (p < STORED)[None, :], other=0.0)


@triton.jit
def load_numbers(base, first, n, num, INTERIOR: tl.constexpr):
    """One number a query, or a key."""
    if INTERIOR:
        return tl.load(base + first + n)
    return tl.load(base + first + n, mask=first + n < num, other=0)


@triton.jit
def spread_kernel(spread_ptr, N, BN: tl.constexpr):
    """32 bits of each key's own: a query tile that walks over the keys would compute each anew."""
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(spread_ptr + j, paired_column_bits(j).to(tl.int32, bitcast=True), mask=j < N)


@triton.jit
def _attend(
    j0, q, eye, k_base, v_base, scores, seen_ptr, bits, spread_ptr, i, p, peak, total, acc, S, L,
    N, span, k_stride, v_stride, steep, INTERIOR: tl.constexpr, HAS_MASK: tl.constexpr,
    DROPPED: tl.constexpr, STORED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of keys added to the softmax of a tile of queries."""
    j0 = tl.multiple_of(j0, BN)
    n = tl.arange(0, BN)
    j = j0 + n
    k = load_rows(k_base, j0, n, p, N, k_stride, INTERIOR, STORED)
    v = load_rows(v_base, j0, n, p, N, v_stride, INTERIOR, STORED)
    score = with_positions(tl.load(scores + j0), eye, INTERIOR)
    score = dot(q, k.T, score)
    if not INTERIOR:
        score = tl.where(in_window(i, j, S, L, span), score, float("-inf"))
    if HAS_MASK:
        seen = tl.load(seen_ptr + j, mask=j < N, other=0)
        score = tl.where((seen != 0)[None, :], score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, axis=1))
    base = tl.where(higher > float("-inf"), higher, 0.0) * steep  # nothing seen yet
    weight = tl.exp2(score * steep - base[:, None])
    shrink = tl.exp2(peak * steep - base)
    total = total * shrink + tl.sum(weight, axis=1)
    if DROPPED > 0:
        spread = load_numbers(spread_ptr, j0, n, N, INTERIOR)
        # Not `where`: the compiler moves that behind the cast, which packs two numbers in a word,
        # and takes each out to choose. (H200: the forward takes 560 us, with `where` 585.)
        kept = survives_paired(bits[:, None], spread[None, :], DROPPED)
        weight *= as_number(kept, tl.float32)
    return higher, total, dot(weight.to(v.dtype), v, acc * shrink[:, None])


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, score_ptr, mask_ptr, bits_ptr, spread_ptr, out_ptr, lse_ptr,
    k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    num_heads, L, N, span, num_heads_rows, num_rows, columns, shift, steep,
    HAS_MASK: tl.constexpr, DROPPED: tl.constexpr, STORED: tl.constexpr, FEATURES: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax in one pass over a query tile's keys, in powers of two: of `steep` times a score.

    lse (X, L) is the log2 of each query's sum, for the backward; 0 where it sees nothing.
    """
    x = tl.program_id(1).to(tl.int64)
    i0 = tl.program_id(0) * BM
    i = i0 + tl.arange(0, BM)
    p = tl.arange(0, P)
    real = i < L
    S = N - L
    q = load_rows(q_ptr + x * L * P, i0, tl.arange(0, BM), p, L, P, False, P)
    k_base = k_ptr + x // num_heads * k_batch + x % num_heads * k_head
    v_base = v_ptr + x // num_heads * v_batch + x % num_heads * v_head
    seen_ptr = mask_ptr + x // num_heads * N
    safe = tl.minimum(i, L - 1)
    first = score_offsets(x, safe, num_heads_rows, num_rows, columns, shift)
    scores = score_ptr + first[:, None] + tl.arange(0, BN)[None, :]
    bits = tl.load(bits_ptr + x * L + i, mask=real, other=0) if DROPPED > 0 else i
    eye = identity(BN, score_ptr.dtype.element_ty)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, P), tl.float32)
    runs = key_runs(i0, S, L, span, BM, BN)
    for INTERIOR in tl.static_range(2):
        low, high = runs[2 * INTERIOR], runs[2 * INTERIOR + 1]
        for at in tl.range(low, high, BN if INTERIOR else 1, num_stages=STAGES):
            peak, total, acc = _attend(
                place_of(at, runs, BN, INTERIOR), q, eye, k_base, v_base, scores, seen_ptr, bits,
                spread_ptr, i, p, peak, total, acc, S, L, N, span, k_stride, v_stride, steep,
                INTERIOR, HAS_MASK, DROPPED, STORED, BN,
            )  # fmt: skip
    empty = total == 0.0
    share = tl.where(empty, 0.0, 1.0 / (1.0 - DROPPED / 4294967296)) / tl.where(empty, 1.0, total)
    out_ptrs = output_places(out_ptr, x, i, p, num_heads, L, FEATURES)
    known = real[:, None] & (p < FEATURES)[None, :]
    tl.store(out_ptrs, (acc * share[:, None]).to(out_ptr.dtype.element_ty), mask=known)
    lse = tl.where(empty, 0.0, peak * steep + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse_ptr + x * L + i, lse, mask=real)


def spread_of_keys(num: int, dropout: float, device: torch.device) -> Tensor:
    """(N,) bits of each key's own; nobody reads them without dropout."""
    spread = torch.empty(num, dtype=torch.int32, device=device)
    if dropout > 0:
        spread_kernel[(triton.cdiv(num, 1024),)](spread, num, BN=1024)
    return spread


def strides_of(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Streams, heads and positions of keys and values; features lie side by side."""
    assert k.stride(3) == 1 and v.stride(3) == 1
    return (*k.stride()[:3], *v.stride()[:3])


def launch(blocks: Blocks) -> dict[str, int]:
    return {
        "P": blocks.k,
        "BM": blocks.m,
        "BN": blocks.n,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def choices(blocks: Blocks, key_mask: Tensor | None, dropout: float) -> dict[str, int]:
    """What kernels that take probabilities are compiled for."""
    return launch(blocks) | {
        "HAS_MASK": key_mask is not None,
        "DROPPED": pair_threshold(dropout),
        "STAGES": blocks.num_stages,
    }


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    key_mask: Tensor | None,
    bits: Tensor,
    scale: float,
    dropout: float,
    features: int,
) -> tuple[Tensor, Tensor]:
    """(B, H, L, `features`) attended values, as `empty_output` has them, and (B, H, L) log2 of each
    query's sum; the features of a head from `features` on are zeros."""
    batch, heads, num_queries, width = q.shape
    band = Band(heads, num_queries, k.shape[2], table.shape[1])
    out = empty_output(q, features)
    lse = torch.empty(q.shape[:3], device=q.device)
    table_8PC = shifted_tables(table, band, q.dtype)
    spread = spread_of_keys(band.keys, dropout, q.device)
    blocks = blocks_for("attention", q.dtype, width)
    for some in band.groups(batch, q.element_size()):
        scores = skewed_scores(comb(whole_rows(q[some], band)), table_8PC)
        mask = q if key_mask is None else key_mask[some].to(torch.uint8)
        num = q[some].shape[0] * heads
        forward_kernel[(triton.cdiv(num_queries, blocks.m), num)](
            *(q[some], k[some], v[some], scores, mask, bits[some], spread, out[some], lse[some]),
            *(*strides_of(k, v), *geometry(band, num), scale * LOG2E),
            STORED=k.shape[3],
            FEATURES=features,
            **choices(blocks, key_mask, dropout),
        )
    return out, lse
