"""Gradient of the queries of window attention: the scores' gradient times the keys and the table.

Both products read the whole buffer of attention_skew.py, so one kernel takes both: it walks over
the columns, and what the product along the band needs was read for the table's shortly before, and
is found in L2. (H200: 443 us a layer of 48 streams, against 520 for one kernel after the other.)

A tile is BM rows of one of the eight planes: every eighth query of a head. Times the table it is a
plain product. Along the band a row on is eight queries on, whose keys stand a comb further left.

Shapes as in attention.py; C columns of the buffer, M rows of eight queries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.attention.triton.forward import blocks_for, launch
from acmoe.ops.attention.triton.output import output_places
from acmoe.ops.attention.triton.skew import COMB, Band, geometry
from acmoe.ops.device.dot import dot
from acmoe.ops.device.tuning import OVERRIDE, Blocks

_PLANES = tl.constexpr(2)  # of a program: they share the tiles of keys


@triton.jit
def _by_columns(
    c0, band, by_table, dscores, k_base, table, m, n, p, first, starts, ends, N, k_stride, plane,
    pitch, columns, TABLE: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """What a strip of columns adds to the gradients of a program's queries.

    Zeros fill a window up to eights, so that no entry asks whether it is in it, only whether its
    eight is: one copy of 16 bytes.
    """
    c = tl.multiple_of(c0, n.shape[0]) + n[None, :]
    band_c = c - m[:, None] * COMB
    rows = m[:, None] * pitch
    j = (first + c0 + n)[:, None]
    k_ptrs = k_base + j.to(tl.int64) * k_stride + p[None, :]
    k = tl.load(k_ptrs, mask=(j >= 0) & (j < N) & (p[None, :] < STORED), other=0.0)
    new_band = ()
    new_by_table = ()
    for b in tl.static_range(_PLANES):
        base = dscores + b * plane
        if TABLE:
            place = (b * p.shape[0] + p[:, None]) * columns + c
            known = (c < columns) & (p[:, None] < STORED)
            positions = tl.load(table + place, mask=known, other=0.0)
        in_band = (band_c >= starts[b]) & (band_c < ends[b])
        along = tl.load(base + rows + band_c, mask=in_band, other=0.0)
        new_band += (dot(along, k, band[b]),)
        if TABLE:
            in_row = (c >= starts[b]) & (c < ends[b])
            row = tl.load(base + rows + c, mask=in_row, other=0.0)
            new_by_table += (dot(row, positions.T, by_table[b]),)
    return new_band, new_by_table if TABLE else by_table


@triton.jit
def _clear_unmet(dscores, m, n, first, unmet, whole, plane, pitch, columns):
    """Zeros where a distance met no key, for the table's own gradient to read."""
    nothing = tl.zeros((m.shape[0], n.shape[0]), dscores.dtype.element_ty)
    for c0 in range(0, tl.minimum(-first, columns), n.shape[0]):
        c = tl.multiple_of(c0, n.shape[0]) + n[None, :]
        for b in tl.static_range(_PLANES):
            rows = dscores + b * plane + m[:, None] * pitch
            tl.store(rows + c, nothing, mask=(c < unmet) & (c < whole))


@triton.jit
def queries_kernel(
    k_ptr, table_ptr, dscore_ptr, dq_ptr, k_batch, k_head, k_stride,
    num_heads, L, N, span, num_heads_rows, num_rows, pitch, shift, columns, left, dq_scale,
    STORED: tl.constexpr, FEATURES: tl.constexpr, P: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """dq as `empty_output` has it; zeros in the scores' gradient where a distance met no key."""
    parts: tl.constexpr = COMB // _PLANES
    tiles = tl.cdiv(num_rows, BM) * parts  # of a head
    x = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    b0 = tile % parts * _PLANES
    a0 = tile // parts * BM
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    p = tl.arange(0, P)
    first = (a0 - shift) * COMB  # the key at column 0 of the first row
    unmet = tl.maximum(-first - m * COMB, 0)[:, None]  # columns of a row before key 0
    whole = tl.where(a0 + m < num_rows, columns, 0)[:, None]
    starts = ()
    ends = ()
    for b in tl.static_range(_PLANES):  # of windows, out to eights
        w = left + b0 + b
        starts += (tl.maximum(unmet, w // COMB * COMB),)
        ends += (tl.minimum(whole, (w + span + COMB - 1) // COMB * COMB),)
    pitch = pitch // COMB * COMB  # so the compiler sees it
    plane = num_heads_rows.to(tl.int64) * pitch
    dscores = dscore_ptr + b0 * plane + (x * num_rows + a0) * pitch
    k_base = k_ptr + x // num_heads * k_batch + x % num_heads * k_head
    table = table_ptr + b0 * P * columns
    # Two sums a query: a product waits for the one before it in the same sum.
    band = (tl.zeros((BM, P), tl.float32),) * _PLANES
    by_table = (tl.zeros((BM, P), tl.float32),) * _PLANES
    start = tl.maximum(-first - (BM - 1) * COMB, 0) // BN * BN
    turn = tl.cdiv(columns, BN) * BN
    for c0 in range(start, turn, BN):
        band, by_table = _by_columns(
            c0, band, by_table, dscores, k_base, table, m, n, p, first, starts, ends, N, k_stride,
            plane, pitch, columns, True, STORED,
        )  # fmt: skip
    for c0 in range(turn, columns + (BM - 1) * COMB, BN):  # the band of the later rows ends later
        band, by_table = _by_columns(
            c0, band, by_table, dscores, k_base, table, m, n, p, first, starts, ends, N, k_stride,
            plane, pitch, columns, False, STORED,
        )  # fmt: skip
    for b in tl.static_range(_PLANES):
        i = (a0 + m) * COMB + b0 + b
        dq = ((band[b] + by_table[b]) * dq_scale).to(dq_ptr.dtype.element_ty)
        known = (i < L)[:, None] & (p < FEATURES)[None, :]
        tl.store(output_places(dq_ptr, x, i, p, num_heads, L, FEATURES), dq, mask=known)
    _clear_unmet(dscores, m, n, first, unmet, whole, plane, pitch, columns)


def _blocks_for(dtype: torch.dtype, width: int, band: Band) -> Blocks:
    """More is fetched ahead where weights are kept, on Hopper, which has the shared memory. (H200:
    422 for 439 us a layer of 48 streams, windows of 2,048; 195 for 212 with 256.)"""
    if band.apart == 0 or width != 64 or "attention_queries" in OVERRIDE:
        return blocks_for("attention_queries", dtype, width)
    return Blocks(64, 64, width, 4, 3) if band.span > 512 else Blocks(64, 32, width, 4, 4)


def queries_gradient(
    k: Tensor,
    table_8PC: Tensor,
    dscore_8RC: Tensor,
    dq: Tensor,
    band: Band,
    scale: float,
    features: int,
) -> None:
    """Fill dq, made by `empty_output`; every distance that met no key gets a gradient of zero. The
    features of k and table from `features` on are zeros."""
    blocks = _blocks_for(dq.dtype, table_8PC.shape[1], band)
    num = dq.shape[0] * band.heads
    queries_kernel[(COMB.value // _PLANES.value * triton.cdiv(band.rows, blocks.m) * num,)](
        *(k, table_8PC, dscore_8RC, dq, *k.stride()[:3], *geometry(band, num)),
        *(band.columns, band.left, scale),
        STORED=k.shape[3],
        FEATURES=features,
        **launch(blocks),
    )
