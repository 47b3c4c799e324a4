"""Attention to a sliding window with relative positions: the skewed scores, and the forward.

A query at key position S + i sees the keys j at distances 1 to W before it, and adds its product
with column W - distance of the table. Those products, one matrix, are the one large buffer: X * L *
W numbers, written once and read once, 0.8 GB in bf16 for 48 streams of 8 heads, 512 queries and
2,048 keys in reach. Streams therefore go in groups, so that the buffer stays below a limit.

The skew. A tile of queries and keys wants entry (i, j) of the buffer at column W - S - i + j, one
column further left in every row, which a copy of 16 bytes cannot follow. So row i is shifted right
by i mod 8: the products of every eighth query are taken with a table shifted alike, and entries
(i, j) then start every row of a tile at a multiple of 8 numbers. What lies in a tile but outside
the window reads a neighbouring row, or the margin around the buffer, and is thrown away.

B streams, H heads, X = B * H, L queries, S keys before them, N = S + L, W distances in reach, P
features of a head (padded to a power of two), C columns of the buffer, M rows of eight queries.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.kernels.products import dot
from acmoe.kernels.tuning import OVERRIDE, Blocks

COMB = tl.constexpr(8)  # rows shifted apart; 8 numbers of 16 bits are one copy of 16 bytes
LOG2E = tl.constexpr(1.4426950408889634)
_MARGIN = 512  # numbers around the buffer: a tile reaches up to BM + BN beyond it
_MOST_BYTES = 2**30  # of scores at a time


class Band(NamedTuple):
    """Sizes of one call, and where entry (i, j) of the skewed scores lies."""

    heads: int
    queries: int  # L
    keys: int  # N
    span: int  # W

    @property
    def left(self) -> int:
        """Empty columns before the first, so that key 0 stands at a multiple of 8."""
        return (self.keys - self.queries - self.span) % 8

    @property
    def shift(self) -> int:
        """Column of key 0 in row 0, in eights."""
        return (self.span - (self.keys - self.queries) + self.left) // 8

    @property
    def columns(self) -> int:
        return triton.cdiv(self.span + self.left + 7, 16) * 16

    @property
    def rows(self) -> int:
        """Rows of eight queries."""
        return triton.cdiv(self.queries, 8)

    def groups(self, batch: int, itemsize: int) -> range:
        """First streams of groups whose scores fit the limit."""
        one = self.heads * 8 * self.rows * self.columns * itemsize
        return range(0, batch, max(1, min(batch, _MOST_BYTES // one)))


def whole_rows(q_BHLP: Tensor, band: Band) -> Tensor:
    """Queries up to a multiple of eight; zeros fill the last row."""
    missing = 8 * band.rows - band.queries
    return torch.nn.functional.pad(q_BHLP, (0, 0, 0, missing)) if missing else q_BHLP


def comb(q_BHLP: Tensor) -> Tensor:
    """(8, X * M, P) view of whole rows: every eighth query together."""
    return q_BHLP.view(-1, 8, q_BHLP.shape[-1]).transpose(0, 1)


def shifted(table_8PC: Tensor, band: Band) -> Tensor:
    """(8, P, W) view of eight tables, the r-th shifted right by r."""
    _, width, columns = table_8PC.shape
    strides = (width * columns + 1, columns, 1)
    return table_8PC.as_strided((8, width, band.span), strides, band.left)


def shifted_tables(table_PW: Tensor, band: Band) -> Tensor:
    """(8, P, C), zero where no distance is in reach."""
    table_8PC = table_PW.new_zeros(8, table_PW.shape[0], band.columns)
    shifted(table_8PC, band).copy_(table_PW)
    return table_8PC


def skewed_scores(q_8RP: Tensor, table_8PC: Tensor) -> Tensor:
    """(8, X * M, C) products of queries and positions, with a margin around them in memory."""
    shape = (8, q_8RP.shape[1], table_8PC.shape[2])
    size = shape[0] * shape[1] * shape[2]
    flat = q_8RP.new_empty(size + 2 * _MARGIN)
    return torch.bmm(q_8RP, table_8PC, out=flat[_MARGIN : _MARGIN + size].view(shape))


def blocks_for(kernel: str, dtype: torch.dtype, width: int) -> Blocks:
    """Queries and keys of a tile; all `width` features at once."""
    if kernel in OVERRIDE:
        return OVERRIDE[kernel]
    if dtype.itemsize > 2:
        return Blocks(32, 32, width, 4, 2)
    wide = width > 64  # more warps share the registers, fewer copies the shared memory
    return Blocks(64, 64, width, 8 if wide else 4, 3 if kernel == "attention" and not wide else 2)


@triton.jit
def score_offsets(x, i, num_heads_rows, num_rows, columns, shift):
    """Where key 0 of each query lies in the skewed scores; in eights, so the compiler sees it."""
    row = (i % COMB).to(tl.int64) * num_heads_rows + x * num_rows + i // COMB
    return row * columns + (shift - i // COMB) * COMB


@triton.jit
def kept(bits, spread, DROPPED: tl.constexpr):
    """True where a probability survives: `bits` are 32 random ones a query, `spread` a key's.

    One xor and one product mix the two. The generators of a library take ten rounds of two wide
    products, which for X * L * W probabilities would cost more than attention itself; its high
    bits, which decide, hang on all of both. DROPPED counts in 2^-32.
    """
    return (bits.to(tl.uint32, bitcast=True) ^ spread) * 0x85EBCA6B >= DROPPED


@triton.jit
def spread_of(j):
    """32 bits of a key's own: two rounds of multiply and shift of its place."""
    bits = (j.to(tl.uint32) + 1) * 0x9E3779B1
    bits = (bits ^ (bits >> 16)) * 0xC2B2AE35
    return bits ^ (bits >> 13)


@triton.jit
def in_window(i, j, S, span):
    distance = S + i - j
    return (distance >= 1) & (distance <= span)


@triton.jit
def inner_keys(i0, S, L, span, start, BM: tl.constexpr, BN: tl.constexpr):
    """Where the tiles of keys begin and end of which every query of a tile sees every key.

    Between them no entry asks whether it is in the window, which costs as much as its softmax.
    """
    first = tl.maximum(S + i0 + BM - 1 - span, 0)
    begin = tl.maximum(start, (first + BN - 1) // BN * BN)
    # The last tile of queries may reach beyond them; there every entry is asked.
    end = tl.where(i0 + BM <= L, (S + i0) // BN * BN, begin)
    return begin, tl.maximum(begin, end)


@triton.jit
def load_rows(base, j, p, N, stride, INTERIOR: tl.constexpr):
    """Keys or values j of one head."""
    place = j[:, None].to(tl.int64) * stride + p[None, :]
    if INTERIOR:
        return tl.load(base + place)
    return tl.load(base + place, mask=(j < N)[:, None], other=0.0)


@triton.jit
def _attend(
    j0, q, k_base, v_base, scores, seen_ptr, bits, i, p, peak, total, acc, S, N, span, k_stride,
    v_stride, scale, INTERIOR: tl.constexpr, HAS_MASK: tl.constexpr, DROPPED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of keys added to the softmax of a tile of queries."""
    j = tl.multiple_of(j0, BN) + tl.arange(0, BN)
    k = load_rows(k_base, j, p, N, k_stride, INTERIOR)
    v = load_rows(v_base, j, p, N, v_stride, INTERIOR)
    score = tl.load(scores[:, None] + j[None, :]).to(tl.float32)
    score = (dot(q, k.T, tl.zeros((BM, BN), tl.float32)) + score) * (scale * LOG2E)
    if not INTERIOR:
        score = tl.where(in_window(i[:, None], j[None, :], S, span), score, float("-inf"))
    if HAS_MASK:
        seen = tl.load(seen_ptr + j, mask=j < N, other=0)
        score = tl.where((seen != 0)[None, :], score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, axis=1))
    base = tl.where(higher > float("-inf"), higher, 0.0)  # nothing seen yet
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weight, axis=1)
    if DROPPED > 0:
        weight = tl.where(kept(bits[:, None], spread_of(j)[None, :], DROPPED), weight, 0.0)
    return higher, total, dot(weight.to(v.dtype), v, acc * shrink[:, None])


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, score_ptr, mask_ptr, bits_ptr, out_ptr, lse_ptr,
    k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    num_heads, L, N, span, num_heads_rows, num_rows, columns, shift, scale,
    HAS_MASK: tl.constexpr, DROPPED: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Softmax in one pass over a query tile's keys, in powers of two.

    lse (X, L) is the log2 of each query's sum, for the backward; 0 where it sees nothing.
    """
    x = tl.program_id(1).to(tl.int64)
    i0 = tl.program_id(0) * BM
    i = i0 + tl.arange(0, BM)
    p = tl.arange(0, P)
    real = i < L
    S = N - L
    q = tl.load(q_ptr + (x * L + i[:, None]) * P + p[None, :], mask=real[:, None], other=0.0)
    k_base = k_ptr + x // num_heads * k_batch + x % num_heads * k_head
    v_base = v_ptr + x // num_heads * v_batch + x % num_heads * v_head
    seen_ptr = mask_ptr + x // num_heads * N
    safe = tl.minimum(i, L - 1)
    scores = score_ptr + score_offsets(x, safe, num_heads_rows, num_rows, columns, shift)
    bits = tl.load(bits_ptr + x * L + i, mask=real, other=0) if DROPPED > 0 else i
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, P), tl.float32)
    start = tl.maximum(S + i0 - span, 0) // BN * BN
    end = S + tl.minimum(i0 + BM, L) - 1
    inner, outer = inner_keys(i0, S, L, span, start, BM, BN)
    for j0 in range(start, tl.minimum(inner, end), BN):
        peak, total, acc = _attend(
            j0, q, k_base, v_base, scores, seen_ptr, bits, i, p, peak, total, acc, S, N, span,
            k_stride, v_stride, scale, False, HAS_MASK, DROPPED, BM, BN,
        )  # fmt: skip
    for j0 in range(inner, outer, BN):
        peak, total, acc = _attend(
            j0, q, k_base, v_base, scores, seen_ptr, bits, i, p, peak, total, acc, S, N, span,
            k_stride, v_stride, scale, True, HAS_MASK, DROPPED, BM, BN,
        )  # fmt: skip
    for j0 in range(outer, end, BN):
        peak, total, acc = _attend(
            j0, q, k_base, v_base, scores, seen_ptr, bits, i, p, peak, total, acc, S, N, span,
            k_stride, v_stride, scale, False, HAS_MASK, DROPPED, BM, BN,
        )  # fmt: skip
    empty = total == 0.0
    share = tl.where(empty, 0.0, 1.0 / (1.0 - DROPPED / 4294967296)) / tl.where(empty, 1.0, total)
    out_ptrs = out_ptr + (x * L + i[:, None]) * P + p[None, :]
    tl.store(out_ptrs, (acc * share[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])
    lse = tl.where(empty, 0.0, peak + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse_ptr + x * L + i, lse, mask=real)


def strides_of(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Streams, heads and positions of keys and values; features lie side by side."""
    assert k.stride(3) == 1 and v.stride(3) == 1
    return (*k.stride()[:3], *v.stride()[:3])


def geometry(band: Band, num: int) -> tuple[int, ...]:
    """The integers every kernel takes, for a group of `num` heads."""
    return (
        *(band.heads, band.queries, band.keys, band.span),
        *(num * band.rows, band.rows, band.columns, band.shift),
    )


def launch(blocks: Blocks, key_mask: Tensor | None, dropout: float) -> dict[str, Any]:
    return {
        "HAS_MASK": key_mask is not None,
        "DROPPED": round(dropout * 2**32),
        "P": blocks.k,
        "BM": blocks.m,
        "BN": blocks.n,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
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
) -> tuple[Tensor, Tensor]:
    """(B, H, L, P) attended values and (B, H, L) log2 of each query's sum."""
    batch, heads, num_queries, width = q.shape
    band = Band(heads, num_queries, k.shape[2], table.shape[1])
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], device=q.device)
    table_8PC = shifted_tables(table.to(q.dtype), band)
    blocks = blocks_for("attention", q.dtype, width)
    groups = band.groups(batch, q.element_size())
    for first in groups:
        some = slice(first, first + groups.step)
        scores = skewed_scores(comb(whole_rows(q[some], band)), table_8PC)
        mask = q if key_mask is None else key_mask[some].to(torch.uint8)
        num = q[some].shape[0] * heads
        forward_kernel[(triton.cdiv(num_queries, blocks.m), num)](
            *(q[some], k[some], v[some], scores, mask, bits[some], out[some], lse[some]),
            *(*strides_of(k, v), *geometry(band, num), scale),
            **launch(blocks, key_mask, dropout),
        )
    return out, lse
