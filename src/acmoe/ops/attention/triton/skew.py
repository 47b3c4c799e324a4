"""A number for every query and key of a window, laid out so that products with keys and with the
table of relative positions can both read it.

One large buffer: X * L * W numbers, 0.8 GB in bf16 for 48 streams of 8 heads, 512 queries and 2,048
keys in reach. It holds products of queries and positions, the weights kept for the backward, or the
gradient of the scores.

The skew. A tile of queries and keys wants entry (i, j) of the buffer at column W - S - i + j, one
column further left in every row, which a copy of 16 bytes cannot follow. So row i is shifted right
by i mod 8: the products of every eighth query are taken with a table shifted alike, and entries
(i, j) then start every row of a tile at a multiple of 8 numbers. What lies in a tile but outside
the window reads a neighbouring row, or the margin around the buffer, and is thrown away.

Where rows lie APART tiles can be written whole: what is outside the window then falls between two
rows, and is zero in both.

B streams, H heads, X = B * H, L queries, S keys before them, N = S + L, W distances in reach, P
features of a head, C columns of the buffer, M rows of eight queries, R = X * M.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

COMB = tl.constexpr(8)  # rows shifted apart; 8 numbers of 16 bits are one copy of 16 bytes
MARGIN = 512  # numbers around the buffer: a tile reaches up to BM + BN beyond it
_MOST_BYTES = 2**30  # of scores at a time
APART = 192  # numbers between rows: a tile of 128 queries and 64 keys reaches no further
_STRIP = 512  # columns of a table a program copies


class Band(NamedTuple):
    """Sizes of one call, and where entry (i, j) of the skewed scores lies."""

    heads: int
    queries: int  # L
    keys: int  # N
    span: int  # W
    apart: int = 0  # numbers between two rows

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
    def pitch(self) -> int:
        """From row to row. Rows that lie apart have their tiles of 64 keys at multiples of 128
        bytes: a tile is written whole, and writes of half sectors are slow."""
        if self.apart == 0:
            return self.columns
        return triton.cdiv(self.columns + self.apart - 8, 64) * 64 + 8

    @property
    def rows(self) -> int:
        """Rows of eight queries."""
        return triton.cdiv(self.queries, 8)

    def size(self, num: int) -> int:
        """Numbers of the buffer of `num` heads, with a margin on either side."""
        return 8 * num * self.rows * self.pitch + 2 * MARGIN

    def groups(self, batch: int, itemsize: int) -> list[slice]:
        """Streams in groups whose scores fit the limit."""
        one = self.heads * 8 * self.rows * self.pitch * itemsize
        step = max(1, min(batch, _MOST_BYTES // one))
        return [slice(first, first + step) for first in range(0, batch, step)]


def whole_rows(q_BHLP: Tensor, band: Band) -> Tensor:
    """Queries up to a multiple of eight; zeros fill the last row."""
    missing = 8 * band.rows - band.queries
    return torch.nn.functional.pad(q_BHLP, (0, 0, 0, missing)) if missing else q_BHLP


def comb(q_BHLP: Tensor) -> Tensor:
    """(8, X * M, P) view of whole rows: every eighth query together."""
    return q_BHLP.view(-1, 8, q_BHLP.shape[-1]).transpose(0, 1)


def shifted_tables(table_PW: Tensor, band: Band, dtype: torch.dtype) -> Tensor:
    """(8, P, C) tables, the r-th shifted right by r; zero where no distance is in reach."""
    width = table_PW.shape[0]
    table_8PC = table_PW.new_empty(8, width, band.columns, dtype=dtype)
    _shift_kernel[(8 * width, triton.cdiv(band.columns, _STRIP))](
        table_PW.contiguous(), table_8PC, width, band.span, band.columns, band.left, BC=_STRIP
    )
    return table_8PC


def add_shifted(dtable_PW: Tensor, dtable_8PC: Tensor, band: Band, scale: float) -> None:
    """Add `scale` times the gradient of the eight tables to that of the one, both float32."""
    width = dtable_PW.shape[0]
    _unshift_kernel[(width, triton.cdiv(band.span, _STRIP))](
        dtable_8PC, dtable_PW, width, band.span, band.columns, band.left, scale, BC=_STRIP
    )


@triton.jit
def _shift_kernel(table_ptr, out_ptr, width, span, columns, left, BC: tl.constexpr):
    """A strip of one feature's row in one of the eight tables."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    w = c - left - row // width
    inside = (w >= 0) & (w < span)
    value = tl.load(table_ptr + row % width * span + w, mask=inside, other=0.0)
    tl.store(out_ptr + row * columns + c, value.to(out_ptr.dtype.element_ty), mask=c < columns)


@triton.jit
def _unshift_kernel(grad_ptr, out_ptr, width, span, columns, left, scale, BC: tl.constexpr):
    """A strip of one feature's gradient, in the order of the tables."""
    p = tl.program_id(0)
    w = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BC,), dtype=tl.float32)
    for r in tl.static_range(COMB):
        at = (r * width + p) * columns + left + r + w
        total += tl.load(grad_ptr + at, mask=w < span, other=0.0)
    out_ptrs = out_ptr + p * span + w
    total = tl.load(out_ptrs, mask=w < span, other=0.0) + scale * total
    tl.store(out_ptrs, total, mask=w < span)


def rows_of(flat: Tensor, band: Band) -> Tensor:
    """(8, R, C) view of a buffer of `Band.size` numbers."""
    return flat[MARGIN:-MARGIN].view(8, -1, band.pitch)[..., : band.columns]


def skewed_scores(q_8RP: Tensor, table_8PC: Tensor) -> Tensor:
    """(8, X * M, C) products of queries and positions, with a margin around them in memory."""
    shape = (8, q_8RP.shape[1], table_8PC.shape[2])
    size = shape[0] * shape[1] * shape[2]
    flat = q_8RP.new_empty(size + 2 * MARGIN)
    return torch.bmm(q_8RP, table_8PC, out=flat[MARGIN : MARGIN + size].view(shape))


def geometry(band: Band, num: int) -> tuple[int, ...]:
    """The integers every kernel takes, for a group of `num` heads."""
    return (
        *(band.heads, band.queries, band.keys, band.span),
        *(num * band.rows, band.rows, band.pitch, band.shift),
    )


@triton.jit
def score_offsets(x, i, num_heads_rows, num_rows, pitch, shift):
    """Where key 0 of each query lies in the skewed scores; in eights, so the compiler sees it."""
    row = (i % COMB).to(tl.int64) * num_heads_rows + x * num_rows + i // COMB
    return row * pitch + (shift - i // COMB) * COMB
