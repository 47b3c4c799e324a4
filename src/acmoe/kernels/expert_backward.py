"""Gradients of the expert MLPs. The activation is computed again, never stored.

    rows         (expert_forward.py) gathers the output gradient and multiplies by down
    activation   recomputes the activation and its slope, and sums the gate's gradient. In the
                 product's epilogue it was slower: 4.7 ms against 1.7 + 0.85 (H200, olmoe), probably
                 for the registers that two more tiles of h take.
    weight       sums outer products of an expert's rows, with the bias gradient beside them

Shapes as in expert_forward.py.
"""

import triton
import triton.language as tl

from acmoe.kernels.expert_forward import _keep, _tile_of


@triton.jit
def activation_kernel(
    da_ptr,
    h_ptr,
    gate_ptr,
    by_bias_ptr,
    gated_ptr,
    dgate_ptr,
    order_ptr,
    expert_ptr,
    end_ptr,
    seed_ptr,
    F,
    num_experts,
    top_k,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    BF: tl.constexpr,
):
    """One routed row: from da, the gradient of y by down, to dh, gate * a and the gate's gradient.

    The activation is computed again from h, and dh written over it: the largest buffer of the
    layer is then held once. Bytes: reads N * (F + W), writes N * (F + W).
    """
    row = tl.program_id(0)
    place = tl.load(order_ptr + row)
    if row >= tl.load(end_ptr + num_experts - 1):
        tl.store(dgate_ptr + place, 0.0)  # sent to no expert
        return
    gate = tl.load(gate_ptr + place).to(tl.float32)
    W = 2 * F if ACT == "swiglu" else F
    base = row.to(tl.int64)
    share = tl.zeros((BF,), dtype=tl.float32)
    for start in range(0, F, BF):
        cols = start + tl.arange(0, BF)
        known = cols < F
        da = tl.load(da_ptr + base * F + cols, mask=known, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + base * W + cols, mask=known, other=0.0).to(tl.float32)
        keep = tl.full((BF,), 1.0, tl.float32)
        if DROPOUT > 0:
            keep = tl.sum(_keep(seed_ptr, row + tl.zeros((1,), tl.int32), cols, F, DROPOUT), axis=0)
        d = da * gate * keep
        if ACT == "swiglu":
            u = tl.load(h_ptr + base * W + F + cols, mask=known, other=0.0).to(tl.float32)
            sig = tl.sigmoid(h)
            silu = h * sig
            a = silu * u * keep
            second = d * silu
            tl.store(h_ptr + base * W + F + cols, second.to(h_ptr.dtype.element_ty), mask=known)
            d *= u * (sig + silu * (1.0 - sig))
        elif ACT == "gelu":
            phi = 0.5 * (1.0 + tl.math.erf(h * 0.7071067811865476))
            a = h * phi * keep
            d *= phi + h * 0.3989422804014327 * tl.exp(-0.5 * h * h)
        else:
            a = tl.maximum(h, 0.0) * keep
            d = tl.where(h > 0, d, 0.0)
        tl.store(h_ptr + base * W + cols, d.to(h_ptr.dtype.element_ty), mask=known)
        tl.store(gated_ptr + base * F + cols, (a * gate).to(gated_ptr.dtype.element_ty), mask=known)
        share += da * a
    total = tl.sum(share, axis=0)
    if HAS_BIAS:  # y holds the bias too, so the gate meets it
        token = (place // top_k).to(tl.int64)
        total += tl.load(by_bias_ptr + token * num_experts + tl.load(expert_ptr + row)).to(
            tl.float32
        )
    tl.store(dgate_ptr + place, total)


@triton.jit
def _bias_step(bias, p, rows, inside, gate_ptr, order_ptr, GATED: tl.constexpr):
    """Sum of p's rows, with the gate where p is the output gradient itself."""
    if GATED:
        place = tl.load(order_ptr + rows, mask=inside, other=0)
        gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
        bias += tl.sum(p.to(tl.float32) * gate[:, None], axis=0)
    else:
        bias += tl.sum(p.to(tl.float32), axis=0)
    return bias


@triton.jit
def _load_block(
    ptr, desc, rows, start, cols, first, width, COPIED: tl.constexpr, EVEN: tl.constexpr
):
    """A full block: `rows` by pointers, or, COPIED by the engine, the rows from `start` on."""
    if COPIED:
        block = desc.load([start, first])
    elif EVEN:
        block = tl.load(ptr + rows[:, None] * width + cols[None, :])
    else:
        mask = (cols < width)[None, :]
        block = tl.load(ptr + rows[:, None] * width + cols[None, :], mask=mask, other=0.0)
    return block


@triton.jit
def weight_kernel(
    p_ptr,
    p_desc,
    q_ptr,
    q_desc,
    gate_ptr,
    dw_ptr,
    db_ptr,
    order_ptr,
    token_ptr,
    end_ptr,
    O,
    I,
    num_splits,
    GROUP: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """dw[e] (O, I) = sum over e's rows of p^T q. GATHER says which of p, q holds tokens, if any.

    GATED: p is the output gradient, and the bias gradient needs the gate, which q carries already.
    Small weights have too few tiles for the chip: then an expert's rows are split, and the parts
    summed after.
    """
    num_i = tl.cdiv(I, BN)
    tile_o, tile_i = _tile_of(tl.program_id(0), tl.cdiv(O, BM), num_i, GROUP)
    first_o, first_i = tile_o * BM, tile_i * BN
    part = tl.program_id(1)
    expert = part // num_splits
    end = tl.load(end_ptr + expert).to(tl.int32)
    begin = tl.where(expert > 0, tl.load(end_ptr + tl.maximum(expert - 1, 0)), 0).to(tl.int32)
    length = tl.cdiv(tl.cdiv(end - begin, num_splits), BK) * BK
    begin = tl.minimum(begin + (part % num_splits) * length, end)
    end = tl.minimum(begin + length, end)
    o = first_o + tl.arange(0, BM)
    i = first_i + tl.arange(0, BN)
    step = tl.arange(0, BK)
    with_bias = tile_i == 0
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    bias = tl.zeros((BM,), dtype=tl.float32)
    full = begin + (end - begin) // BK * BK
    # The tokens of the next block are fetched a block ahead, so that a gather never waits for them.
    token = (begin + step).to(tl.int64)
    if GATHER != "none":
        token = tl.load(token_ptr + begin + step, mask=begin + step < end, other=0).to(tl.int64)
    for start in range(begin, full, BK):
        rows = start + step
        rows64 = rows.to(tl.int64)
        following = rows64 + BK
        if GATHER != "none":
            ahead = rows + BK
            following = tl.load(token_ptr + ahead, mask=ahead < end, other=0).to(tl.int64)
        p_rows = token if GATHER == "p" else rows64
        q_rows = token if GATHER == "q" else rows64
        p = _load_block(
            p_ptr, p_desc, p_rows, start, o, first_o, O, TMA and GATHER != "p", EVEN
        )  # fmt: skip
        q = _load_block(
            q_ptr, q_desc, q_rows, start, i, first_i, I, TMA and GATHER != "q", EVEN
        )  # fmt: skip
        acc = tl.dot(tl.trans(p), q, acc)
        if HAS_BIAS:
            if with_bias:
                bias = _bias_step(bias, p, rows, rows < end, gate_ptr, order_ptr, GATED)
        token = following
    if full < end:  # the last rows, fewer than a block
        rows = full + step
        inside = rows < end
        rows64 = tl.minimum(rows, end - 1).to(tl.int64)
        p_rows = token if GATHER == "p" else rows64
        q_rows = token if GATHER == "q" else rows64
        p_mask = inside[:, None] & (o < O)[None, :]
        q_mask = inside[:, None] & (i < I)[None, :]
        p = tl.load(p_ptr + p_rows[:, None] * O + o[None, :], mask=p_mask, other=0.0)
        q = tl.load(q_ptr + q_rows[:, None] * I + i[None, :], mask=q_mask, other=0.0)
        acc = tl.dot(tl.trans(p), q, acc)
        if HAS_BIAS:
            if with_bias:
                bias = _bias_step(bias, p, rows, inside, gate_ptr, order_ptr, GATED)
    w_ptrs = dw_ptr + (part.to(tl.int64) * O + o[:, None]) * I + i[None, :]
    tl.store(w_ptrs, acc.to(dw_ptr.dtype.element_ty), mask=(o < O)[:, None] & (i < I)[None, :])
    if HAS_BIAS:
        if with_bias:
            tl.store(db_ptr + part * O + o, bias.to(db_ptr.dtype.element_ty), mask=o < O)
