"""Skewed layout of a banded matrix: one element for every query and every key inside its window.

The buffer has X * L * W elements: 0.8 GB in bf16 for a batch of 48, 8 heads, 512 queries and a
window of 2,048 keys. It holds the relative-position scores q @ rel_emb, the attention weights saved
for backward, or the gradient of the scores. Two kinds of GEMM read it: one has keys as columns (the
GEMMs with k and v), the other has distances as columns (the GEMMs with the relative-position
embedding).

Skew. With distances as columns, element (i, j) is in column W - S - i + j of row i. A tile of
queries and keys then starts one column further left in each row, so aligned copies of 16 bytes
cannot load it. The layout therefore groups the queries into 8 planes by i mod 8 and shifts the rows
of plane r right by r columns; the GEMM that fills plane r reads a copy of the embedding that is
shifted in the same way. Every row of a (query, key) tile then starts at a multiple of 8 elements.
Eight queries further is one row further in the same plane, and the keys move 8 columns left. Tile
elements outside the window alias a neighbouring row or the margin around the buffer, and their
values are discarded.

With a gap of ROW_GAP elements between rows, kernels can store whole tiles: the elements outside the
window fall into the gap between two rows, and are zero for both.

Work split: `_shift_kernel` runs one program per copy, feature and block of columns of the
embedding, `_unshift_kernel` one per feature and block of columns; the GEMMs are torch.bmm.

Shapes: B batch, H heads, X = B * H, L queries, S keys before the first query, N = S + L keys,
W window (distances 1 to W), P head dimension, C columns of a row, M = ceil(L / 8) rows per head and
plane, R = X * M.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SKEW = tl.constexpr(8)  # number of planes; 8 elements of 16 bits are one copy of 16 bytes
MARGIN = 512  # elements before and after the buffer: a tile reaches up to BM + BN beyond it
_MAX_SCORE_BYTES = 2**30  # size limit of the score buffer of one launch
ROW_GAP = 192  # elements between rows: a tile of 128 queries and 64 keys reaches no further
_BLOCK_COLUMNS = 512  # columns of the embedding that one program copies


class SkewLayout(NamedTuple):
    """Problem sizes of one call, and the position of element (i, j) in the skewed buffer."""

    heads: int
    queries: int  # L
    keys: int  # N
    span: int  # W
    row_gap: int = 0  # elements between two rows

    @property
    def left_pad(self) -> int:
        """Number of empty columns before the first one; they align key 0 to 8 columns."""
        return (self.keys - self.queries - self.span) % 8

    @property
    def key0_block(self) -> int:
        """Column of key 0 in row 0, divided by 8."""
        return (self.span - (self.keys - self.queries) + self.left_pad) // 8

    @property
    def columns(self) -> int:
        """Columns of a row (C), a multiple of 16."""
        return triton.cdiv(self.span + self.left_pad + 7, 16) * 16

    @property
    def pitch(self) -> int:
        """Elements from one row to the next.

        With a row gap, tiles of 64 keys start at multiples of 128 bytes, because tiles are stored
        whole and stores of half sectors are slow.
        """
        if self.row_gap == 0:
            return self.columns
        return triton.cdiv(self.columns + self.row_gap - 8, 64) * 64 + 8

    @property
    def rows(self) -> int:
        """Rows per head and plane (M): eight queries share a row index."""
        return triton.cdiv(self.queries, 8)

    def numel(self, num_heads: int) -> int:
        """Elements of the buffer for `num_heads` heads (X), including both margins."""
        return 8 * num_heads * self.rows * self.pitch + 2 * MARGIN

    def batch_slices(self, batch: int, itemsize: int) -> list[slice]:
        """Split the batch into slices whose score buffers stay below the size limit."""
        stream_bytes = self.heads * 8 * self.rows * self.pitch * itemsize
        step = max(1, min(batch, _MAX_SCORE_BYTES // stream_bytes))
        return [slice(first, first + step) for first in range(0, batch, step)]


def pad_queries(q_BHLP: Tensor, skew: SkewLayout) -> Tensor:
    """Pad the queries with zeros to a multiple of eight."""
    missing = 8 * skew.rows - skew.queries
    return torch.nn.functional.pad(q_BHLP, (0, 0, 0, missing)) if missing else q_BHLP


def query_planes(q_BHLP: Tensor) -> Tensor:
    """View padded queries as (8, R, P): plane r holds the queries i with i mod 8 = r."""
    return q_BHLP.view(-1, 8, q_BHLP.shape[-1]).transpose(0, 1)


def shift_rel_emb(rel_emb_PW: Tensor, skew: SkewLayout, dtype: torch.dtype) -> Tensor:
    """Return (8, P, C) copies of the relative-position embedding, copy r shifted right by r.

    Columns outside the window are zero.
    """
    width = rel_emb_PW.shape[0]
    rel_emb_8PC = rel_emb_PW.new_empty(8, width, skew.columns, dtype=dtype)
    _shift_kernel[(8 * width, triton.cdiv(skew.columns, _BLOCK_COLUMNS))](
        rel_emb_PW.contiguous(),
        *(rel_emb_8PC, width, skew.span, skew.columns, skew.left_pad),
        BC=_BLOCK_COLUMNS,
    )
    return rel_emb_8PC


def add_shifted_gradient(
    drel_emb_PW: Tensor, drel_emb_8PC: Tensor, skew: SkewLayout, scale: float
) -> None:
    """Add `scale` times the summed gradients of the eight shifted copies to drel_emb_PW.

    Both tensors are float32.
    """
    width = drel_emb_PW.shape[0]
    _unshift_kernel[(width, triton.cdiv(skew.span, _BLOCK_COLUMNS))](
        *(drel_emb_8PC, drel_emb_PW, width, skew.span, skew.columns, skew.left_pad, scale),
        BC=_BLOCK_COLUMNS,
    )


@triton.jit
def _shift_kernel(rel_emb_ptr, out_ptr, width, span, columns, left_pad, BC: tl.constexpr):
    """Copy BC columns of one feature into one of the eight shifted embeddings."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    w = c - left_pad - row // width
    in_span = (w >= 0) & (w < span)
    value = tl.load(rel_emb_ptr + row % width * span + w, mask=in_span, other=0.0)
    tl.store(out_ptr + row * columns + c, value.to(out_ptr.dtype.element_ty), mask=c < columns)


@triton.jit
def _unshift_kernel(grad_ptr, out_ptr, width, span, columns, left_pad, scale, BC: tl.constexpr):
    """Sum one feature's gradient over the eight shifted copies, in the order of the copies."""
    p = tl.program_id(0)
    w = tl.program_id(1) * BC + tl.arange(0, BC)
    grad = tl.zeros((BC,), dtype=tl.float32)
    for r in tl.static_range(SKEW):
        offsets = (r * width + p) * columns + left_pad + r + w
        grad += tl.load(grad_ptr + offsets, mask=w < span, other=0.0)
    out_ptrs = out_ptr + p * span + w
    grad = tl.load(out_ptrs, mask=w < span, other=0.0) + scale * grad
    tl.store(out_ptrs, grad, mask=w < span)


def skewed_view(flat: Tensor, skew: SkewLayout) -> Tensor:
    """View a buffer of `SkewLayout.numel` elements as (8, R, C), without its margins."""
    return flat[MARGIN:-MARGIN].view(8, -1, skew.pitch)[..., : skew.columns]


def skewed_position_scores(q_8RP: Tensor, rel_emb_8PC: Tensor) -> Tensor:
    """Return (8, R, C) = q_8RP @ rel_emb_8PC, inside a buffer with a margin on both sides."""
    shape = (8, q_8RP.shape[1], rel_emb_8PC.shape[2])
    size = shape[0] * shape[1] * shape[2]
    flat = q_8RP.new_empty(size + 2 * MARGIN)
    return torch.bmm(q_8RP, rel_emb_8PC, out=flat[MARGIN : MARGIN + size].view(shape))


def layout_arguments(skew: SkewLayout, num_heads: int) -> tuple[int, ...]:
    """Return the integer arguments common to all kernels, for `num_heads` heads (X)."""
    return (
        *(skew.heads, skew.queries, skew.keys, skew.span),
        *(num_heads * skew.rows, skew.rows, skew.pitch, skew.key0_block),
    )


@triton.jit
def score_offsets(x, i, total_rows, num_rows, pitch, key0_block):
    """Offset of (query i, key 0) of head x in the skewed buffer.

    The column is written as a multiple of 8, so that the compiler can prove the alignment.
    """
    row = (i % SKEW).to(tl.int64) * total_rows + x * num_rows + i // SKEW
    return row * pitch + (key0_block - i // SKEW) * SKEW
