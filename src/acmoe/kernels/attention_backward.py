"""Gradients of attention to a sliding window. Scores and dropout are computed again.

    delta     output times its gradient, summed for each query
    keys      one program a tile of keys walks over the queries that see it: dk, dv
    queries   one program a tile of queries walks over its keys: dq, and the gradient of the skewed
              scores, each written exactly once, over the scores themselves

Two products then carry the scores' gradient on to queries and table. No atomics: equal inputs give
equal bits. Shapes and the skew as in attention.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.kernels.attention import (
    COMB,
    LOG2E,
    Band,
    blocks_for,
    comb,
    geometry,
    in_window,
    inner_keys,
    kept,
    launch,
    load_rows,
    score_offsets,
    shifted,
    shifted_tables,
    skewed_scores,
    spread_of,
    strides_of,
    whole_rows,
)
from acmoe.kernels.products import dot

_KERNELS = ("attention_keys", "attention_queries")


@triton.jit
def delta_kernel(out_ptr, grad_ptr, delta_ptr, num, P: tl.constexpr, BM: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    real = rows < num
    place = rows[:, None] * P + tl.arange(0, P)[None, :]
    out = tl.load(out_ptr + place, mask=real[:, None], other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + place, mask=real[:, None], other=0.0).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(out * grad, axis=1), mask=real)


@triton.jit
def _by_query(
    i0, k, v, q_ptr, grad_ptr, score_ptr, bits_ptr, lse_ptr, delta_ptr, open_to_all, spread, j, p,
    dk, dv, x, L, S, span, num_heads_rows, num_rows, columns, shift, scale,
    INTERIOR: tl.constexpr, HAS_MASK: tl.constexpr, DROPPED: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to the gradients of a tile of keys and values."""
    i = tl.multiple_of(i0, BM) + tl.arange(0, BM)
    real = i < L
    rows = (x * L + i[:, None]) * P + p[None, :]
    q = tl.load(q_ptr + rows, mask=real[:, None], other=0.0)
    grad = tl.load(grad_ptr + rows, mask=real[:, None], other=0.0)
    lse = tl.load(lse_ptr + x * L + i, mask=real, other=0.0)
    delta = tl.load(delta_ptr + x * L + i, mask=real, other=0.0)
    safe = tl.minimum(i, L - 1)
    scores = score_ptr + score_offsets(x, safe, num_heads_rows, num_rows, columns, shift)
    score = tl.load(scores[None, :] + j[:, None]).to(tl.float32)
    score = dot(k, q.T, tl.zeros((BN, BM), tl.float32)) + score
    weight = tl.exp2(score * (scale * LOG2E) - lse[None, :])
    if not INTERIOR:
        allowed = in_window(i[None, :], j[:, None], S, span) & real[None, :]
        weight = tl.where(allowed, weight, 0.0)
    if HAS_MASK:
        weight = tl.where(open_to_all[:, None], weight, 0.0)
    dweight = dot(v, grad.T, tl.zeros((BN, BM), tl.float32))
    if DROPPED > 0:
        bits = tl.load(bits_ptr + x * L + i, mask=real, other=0)
        keep = kept(bits[None, :], spread[:, None], DROPPED)
        grown = tl.where(keep, 4294967296 / (4294967296 - DROPPED), 0.0)
        dv = dot((weight * grown).to(grad.dtype), grad, dv)
        dweight *= grown
    else:
        dv = dot(weight.to(grad.dtype), grad, dv)
    dscore = weight * (dweight - delta[None, :])
    return dot(dscore.to(q.dtype), q, dk), dv


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, score_ptr, mask_ptr, bits_ptr, grad_ptr, lse_ptr, delta_ptr,
    dk_ptr, dv_ptr, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    num_heads, L, N, span, num_heads_rows, num_rows, columns, shift, scale,
    HAS_MASK: tl.constexpr, DROPPED: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Tiles stand with keys down and queries across, so that no product needs one turned."""
    x = tl.program_id(1).to(tl.int64)
    j0 = tl.program_id(0) * BN
    j = j0 + tl.arange(0, BN)
    p = tl.arange(0, P)
    known = j < N
    S = N - L
    k_place = x // num_heads * k_batch + x % num_heads * k_head
    k_place = k_place + j[:, None].to(tl.int64) * k_stride + p[None, :]
    v_place = x // num_heads * v_batch + x % num_heads * v_head
    v_place = v_place + j[:, None].to(tl.int64) * v_stride + p[None, :]
    k = tl.load(k_ptr + k_place, mask=known[:, None], other=0.0)
    v = tl.load(v_ptr + v_place, mask=known[:, None], other=0.0)
    open_to_all = known
    if HAS_MASK:
        seen = tl.load(mask_ptr + x // num_heads * N + j, mask=known, other=0)
        open_to_all = seen != 0
    spread = spread_of(j)
    dk = tl.zeros((BN, P), tl.float32)
    dv = tl.zeros((BN, P), tl.float32)
    start = tl.maximum(j0 + 1 - S, 0) // BM * BM
    end = tl.minimum(j0 + BN + span - S, L)
    # Tiles of queries all of which see all of these keys.
    inner = tl.maximum(start, (tl.maximum(j0 + BN - S, 0) + BM - 1) // BM * BM)
    outer = tl.maximum(tl.minimum(j0 + span - S + 1, L), 0) // BM * BM
    outer = tl.maximum(inner, outer)
    for i0 in range(start, tl.minimum(inner, end), BM):
        dk, dv = _by_query(
            i0, k, v, q_ptr, grad_ptr, score_ptr, bits_ptr, lse_ptr, delta_ptr, open_to_all,
            spread, j, p, dk, dv, x, L, S, span, num_heads_rows, num_rows, columns, shift, scale,
            False, HAS_MASK, DROPPED, P, BM, BN,
        )  # fmt: skip
    for i0 in range(inner, outer, BM):
        dk, dv = _by_query(
            i0, k, v, q_ptr, grad_ptr, score_ptr, bits_ptr, lse_ptr, delta_ptr, open_to_all,
            spread, j, p, dk, dv, x, L, S, span, num_heads_rows, num_rows, columns, shift, scale,
            True, HAS_MASK, DROPPED, P, BM, BN,
        )  # fmt: skip
    for i0 in range(outer, end, BM):
        dk, dv = _by_query(
            i0, k, v, q_ptr, grad_ptr, score_ptr, bits_ptr, lse_ptr, delta_ptr, open_to_all,
            spread, j, p, dk, dv, x, L, S, span, num_heads_rows, num_rows, columns, shift, scale,
            False, HAS_MASK, DROPPED, P, BM, BN,
        )  # fmt: skip
    tl.store(dk_ptr + k_place, (dk * scale).to(dk_ptr.dtype.element_ty), mask=known[:, None])
    tl.store(dv_ptr + v_place, dv.to(dv_ptr.dtype.element_ty), mask=known[:, None])


@triton.jit
def _by_key(
    j0, q, grad, lse, delta, k_base, v_base, scores, seen_ptr, bits, i, p, dq, S, L, N, span,
    k_stride, v_stride, scale, INTERIOR: tl.constexpr, HAS_MASK: tl.constexpr,
    DROPPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What one tile of keys adds to the gradient of a tile of queries, and that of its scores."""
    j = tl.multiple_of(j0, BN) + tl.arange(0, BN)
    k = load_rows(k_base, j, p, N, k_stride, INTERIOR)
    v = load_rows(v_base, j, p, N, v_stride, INTERIOR)
    score_ptrs = scores[:, None] + j[None, :]
    score = tl.load(score_ptrs).to(tl.float32)
    score = dot(q, k.T, tl.zeros((BM, BN), tl.float32)) + score
    weight = tl.exp2(score * (scale * LOG2E) - lse[:, None])
    window = in_window(i[:, None], j[None, :], S, span) & (i < L)[:, None]
    if not INTERIOR:
        weight = tl.where(window, weight, 0.0)
    if HAS_MASK:
        seen = tl.load(seen_ptr + j, mask=j < N, other=0)
        weight = tl.where((seen != 0)[None, :], weight, 0.0)
    dweight = dot(grad, v.T, tl.zeros((BM, BN), tl.float32))
    if DROPPED > 0:
        keep = kept(bits[:, None], spread_of(j)[None, :], DROPPED)
        dweight = tl.where(keep, dweight * (4294967296 / (4294967296 - DROPPED)), 0.0)
    dscore = (weight * (dweight - delta[:, None]) * scale).to(k.dtype)
    if INTERIOR:  # whole lines of 16 bytes; a mask would write number by number
        tl.store(score_ptrs, dscore)
    else:
        tl.store(score_ptrs, dscore, mask=window)
    return dot(dscore, k, dq)


@triton.jit
def queries_kernel(
    q_ptr, k_ptr, v_ptr, score_ptr, mask_ptr, bits_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr,
    k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    num_heads, L, N, span, num_heads_rows, num_rows, columns, shift, scale,
    HAS_MASK: tl.constexpr, DROPPED: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq (X, 8 * M, P) without the table's part, and the scores' gradient in their place."""
    x = tl.program_id(1).to(tl.int64)
    i0 = tl.program_id(0) * BM
    i = i0 + tl.arange(0, BM)
    p = tl.arange(0, P)
    real = i < L
    S = N - L
    rows = (x * L + i[:, None]) * P + p[None, :]
    q = tl.load(q_ptr + rows, mask=real[:, None], other=0.0)
    grad = tl.load(grad_ptr + rows, mask=real[:, None], other=0.0)
    lse = tl.load(lse_ptr + x * L + i, mask=real, other=0.0)
    delta = tl.load(delta_ptr + x * L + i, mask=real, other=0.0)
    k_base = k_ptr + x // num_heads * k_batch + x % num_heads * k_head
    v_base = v_ptr + x // num_heads * v_batch + x % num_heads * v_head
    seen_ptr = mask_ptr + x // num_heads * N
    safe = tl.minimum(i, L - 1)
    scores = score_ptr + score_offsets(x, safe, num_heads_rows, num_rows, columns, shift)
    bits = tl.load(bits_ptr + x * L + i, mask=real, other=0) if DROPPED > 0 else i
    dq = tl.zeros((BM, P), tl.float32)
    start = tl.maximum(S + i0 - span, 0) // BN * BN
    end = S + tl.minimum(i0 + BM, L) - 1
    inner, outer = inner_keys(i0, S, L, span, start, BM, BN)
    for j0 in range(start, tl.minimum(inner, end), BN):
        dq = _by_key(
            j0, q, grad, lse, delta, k_base, v_base, scores, seen_ptr, bits, i, p, dq, S, L, N,
            span, k_stride, v_stride, scale, False, HAS_MASK, DROPPED, BM, BN,
        )  # fmt: skip
    for j0 in range(inner, outer, BN):
        dq = _by_key(
            j0, q, grad, lse, delta, k_base, v_base, scores, seen_ptr, bits, i, p, dq, S, L, N,
            span, k_stride, v_stride, scale, True, HAS_MASK, DROPPED, BM, BN,
        )  # fmt: skip
    for j0 in range(outer, end, BN):
        dq = _by_key(
            j0, q, grad, lse, delta, k_base, v_base, scores, seen_ptr, bits, i, p, dq, S, L, N,
            span, k_stride, v_stride, scale, False, HAS_MASK, DROPPED, BM, BN,
        )  # fmt: skip
    dq_ptrs = dq_ptr + (x * num_rows * COMB + i[:, None]) * P + p[None, :]
    tl.store(dq_ptrs, dq.to(dq_ptr.dtype.element_ty), mask=real[:, None])
    # Distances that reach beyond the first key met none, and carry no gradient.
    for j0 in range(tl.minimum(S + i0 - span, 0), 0, BN):
        j = j0 + tl.arange(0, BN)
        beyond = (S + i[:, None] - j[None, :] <= span) & (j < 0)[None, :] & real[:, None]
        nothing = tl.zeros((BM, BN), score_ptr.dtype.element_ty)
        tl.store(scores[:, None] + j[None, :], nothing, mask=beyond)


def _delta(out: Tensor, grad: Tensor) -> Tensor:
    delta = torch.empty(out.shape[:3], device=out.device)
    delta_kernel[(triton.cdiv(delta.numel(), 64),)](
        out, grad, delta, delta.numel(), P=out.shape[3], BM=64, num_warps=4
    )
    return delta


def _table_gradient(q_8RP: Tensor, dscore_8RC: Tensor, band: Band) -> Tensor:
    """(P, W) float32 sum over all queries."""
    if q_8RP.is_cuda and q_8RP.dtype != torch.float32:
        dtable_8PC = torch.bmm(q_8RP.mT, dscore_8RC, out_dtype=torch.float32)
    else:
        dtable_8PC = torch.bmm(q_8RP.float().mT, dscore_8RC.float())
    return shifted(dtable_8PC, band).sum(0)


def run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    key_mask: Tensor | None,
    bits: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and table, each in its own shape and dtype."""
    batch, heads, num_queries, width = q.shape
    band = Band(heads, num_queries, k.shape[2], table.shape[1])
    dq = q.new_empty(batch, heads, 8 * band.rows, width)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    assert strides_of(dk, dv) == strides_of(k, v)
    dtable = torch.zeros(table.shape, device=q.device)
    table_8PC = shifted_tables(table.to(q.dtype), band)
    delta = _delta(out, grad)
    by_keys, by_queries = (blocks_for(name, q.dtype, width) for name in _KERNELS)
    groups = band.groups(batch, q.element_size())
    for first in groups:
        some = slice(first, first + groups.step)
        q_8RP = comb(whole_rows(q[some], band))
        scores = skewed_scores(q_8RP, table_8PC)
        mask = q if key_mask is None else key_mask[some].to(torch.uint8)
        num = q[some].shape[0] * heads
        rest = (grad[some], lse[some], delta[some])
        given = (q[some], k[some], v[some], scores, mask, bits[some], *rest)
        sizes = (*strides_of(k, v), *geometry(band, num), scale)
        # First the keys: the queries' kernel leaves gradients where the scores were.
        keys_kernel[(triton.cdiv(band.keys, by_keys.n), num)](
            *(*given, dk[some], dv[some], *sizes), **launch(by_keys, key_mask, dropout)
        )
        queries_kernel[(triton.cdiv(num_queries, by_queries.m), num)](
            *(*given, dq[some], *sizes), **launch(by_queries, key_mask, dropout)
        )
        dtable += _table_gradient(q_8RP, scores, band)
        comb(dq[some]).baddbmm_(scores, table_8PC.mT)
    return dq[:, :, :num_queries].contiguous(), dk, dv, dtable.to(table.dtype)
