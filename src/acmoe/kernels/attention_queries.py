"""Gradient of the queries of window attention: the scores' gradient times the keys and the table.

Both products read the whole buffer of attention_skew.py, so one kernel takes both: it walks over
the columns, and what the product along the band needs was read for the table's shortly before, and
is found in L2. (H200: 443 us a layer of 48 streams, against 520 for one kernel after the other.)

A tile is BM rows of one of the eight planes: every eighth query of a head. Times the table it is a
plain product. Along the band a row on is eight queries on, whose keys stand a comb further left.

Shapes as in attention.py; C columns of the buffer, M rows of eight queries.
"""

import triton
import triton.language as tl
from torch import Tensor

from acmoe.kernels.attention import blocks_for, launch
from acmoe.kernels.attention_skew import COMB, Band, geometry
from acmoe.kernels.products import dot

_PLANES = tl.constexpr(2)  # of a program: they share the tiles of keys


@triton.jit
def _by_columns(
    c0, band, by_table, dscores, k_base, table, m, n, p, first, unmet, whole, N, k_stride, plane,
    columns, TABLE: tl.constexpr,
):  # fmt: skip
    """What a strip of columns adds to the gradients of a program's queries.

    A row holds zeros around its window, so that no entry asks whether it is in it, only whether it
    is in its row: eight numbers at a time, in one copy of 16 bytes.
    """
    c = tl.multiple_of(c0, n.shape[0]) + n[None, :]
    band_c = c - m[:, None] * COMB
    in_band = (band_c >= unmet) & (band_c < whole)
    in_row = (c >= unmet) & (c < whole)
    rows = m[:, None] * columns
    j = (first + c0 + n)[:, None]
    k_ptrs = k_base + j.to(tl.int64) * k_stride + p[None, :]
    k = tl.load(k_ptrs, mask=(j >= 0) & (j < N), other=0.0)
    new_band = ()
    new_by_table = ()
    for b in tl.static_range(_PLANES):
        base = dscores + b * plane
        if TABLE:
            place = (b * p.shape[0] + p[:, None]) * columns + c
            positions = tl.load(table + place, mask=c < columns, other=0.0)
        along = tl.load(base + rows + band_c, mask=in_band, other=0.0)
        new_band += (dot(along, k, band[b]),)
        if TABLE:
            row = tl.load(base + rows + c, mask=in_row, other=0.0)
            new_by_table += (dot(row, positions.T, by_table[b]),)
    return new_band, new_by_table if TABLE else by_table


@triton.jit
def _clear_unmet(dscores, m, n, first, unmet, whole, plane, columns):
    """Zeros where a distance met no key, for the table's own gradient to read."""
    nothing = tl.zeros((m.shape[0], n.shape[0]), dscores.dtype.element_ty)
    for c0 in range(0, tl.minimum(-first, columns), n.shape[0]):
        c = tl.multiple_of(c0, n.shape[0]) + n[None, :]
        for b in tl.static_range(_PLANES):
            rows = dscores + b * plane + m[:, None] * columns
            tl.store(rows + c, nothing, mask=(c < unmet) & (c < whole))


@triton.jit
def queries_kernel(
    k_ptr, table_ptr, dscore_ptr, dq_ptr, k_batch, k_head, k_stride,
    num_heads, L, N, span, num_heads_rows, num_rows, columns, shift, dq_scale,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq (X, L, P); and zeros in the scores' gradient where a distance met no key."""
    parts: tl.constexpr = COMB // _PLANES
    x = tl.program_id(1).to(tl.int64)
    b0 = tl.program_id(0) % parts * _PLANES
    a0 = tl.program_id(0) // parts * BM
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    p = tl.arange(0, P)
    first = (a0 - shift) * COMB  # the key at column 0 of the first row
    unmet = tl.maximum(-first - m * COMB, 0)[:, None]  # columns of a row before key 0
    whole = tl.where(a0 + m < num_rows, columns, 0)[:, None]
    plane = num_heads_rows.to(tl.int64) * columns
    dscores = dscore_ptr + b0 * plane + (x * num_rows + a0) * columns
    k_base = k_ptr + x // num_heads * k_batch + x % num_heads * k_head
    table = table_ptr + b0 * P * columns
    # Two sums a query: a product waits for the one before it in the same sum.
    band = (tl.zeros((BM, P), tl.float32),) * _PLANES
    by_table = (tl.zeros((BM, P), tl.float32),) * _PLANES
    start = tl.maximum(-first - (BM - 1) * COMB, 0) // BN * BN
    turn = tl.cdiv(columns, BN) * BN
    for c0 in range(start, turn, BN):
        band, by_table = _by_columns(
            c0, band, by_table, dscores, k_base, table, m, n, p, first, unmet, whole, N, k_stride,
            plane, columns, True,
        )  # fmt: skip
    for c0 in range(turn, columns + (BM - 1) * COMB, BN):  # the band of the later rows ends later
        band, by_table = _by_columns(
            c0, band, by_table, dscores, k_base, table, m, n, p, first, unmet, whole, N, k_stride,
            plane, columns, False,
        )  # fmt: skip
    for b in tl.static_range(_PLANES):
        i = ((a0 + m) * COMB + b0 + b)[:, None]
        dq = ((band[b] + by_table[b]) * dq_scale).to(dq_ptr.dtype.element_ty)
        tl.store(dq_ptr + (x * L + i) * P + p[None, :], dq, mask=i < L)
    _clear_unmet(dscores, m, n, first, unmet, whole, plane, columns)


def queries_gradient(
    k: Tensor, table_8PC: Tensor, dscore_8RC: Tensor, dq: Tensor, band: Band, scale: float
) -> None:
    """Fill dq (B, H, L, P); every distance that met no key gets a gradient of zero."""
    blocks = blocks_for("attention_queries", dq.dtype, dq.shape[3])
    num = dq.shape[0] * band.heads
    queries_kernel[(COMB.value // _PLANES.value * triton.cdiv(band.rows, blocks.m), num)](
        *(k, table_8PC, dscore_8RC, dq, *k.stride()[:3], *geometry(band, num), scale),
        **launch(blocks),
    )
