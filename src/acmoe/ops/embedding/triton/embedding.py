"""Rows summed by the word they belong to, in an order that never changes: no atomics.

Rows come sorted by word, so a word's rows are a run. Two launches:
    walk    one program a chunk of R sorted rows: a run that lies inside is summed and stored; what
            the chunk holds of a run that crosses its edges goes aside
    join    one program a chunk: where a run begins there and goes on, its parts are added

A long run (the blank of a byte corpus is a sixth of all rows) is thus spread over many programs.

Floor: rows read once, V D numbers written once.

T rows, D features, V words, C chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, FEATURES = 16, 128  # of one program; a chunk's rows are read one after the other
PARTS = 32  # chunks of a long run added at one time


@triton.jit
def _walk_kernel(
    rows_ptr, word_ptr, order_ptr, sum_ptr, came_ptr, leaves_ptr, T, D,
    R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """`came`: the part of a run that began in an earlier chunk. `leaves`: of one that goes on."""
    chunk = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = chunk * R
    word = tl.load(word_ptr + first).to(tl.int64)
    own = word != tl.load(word_ptr + first - 1, mask=chunk > 0, other=-1)  # began in this chunk
    total = tl.zeros((BD,), dtype=tl.float32)
    for step in range(R):
        t = first + step
        next_word = tl.load(word_ptr + t, mask=t < T, other=-1).to(tl.int64)
        ends = next_word != word
        rounded = total.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + word * D + d, rounded, mask=d < tl.where(ends & own, D, 0))
        tl.store(came_ptr + chunk * D + d, total, mask=d < tl.where(ends & (own == 0), D, 0))
        row = tl.load(order_ptr + t, mask=t < T, other=0)
        value = tl.load(rows_ptr + row * D + d, mask=d < tl.where(t < T, D, 0), other=0.0)
        total = tl.where(ends, 0.0, total) + value.to(tl.float32)
        own = own | ends
        word = next_word
    # Past the last row the word is -1, whose sum nobody wants.
    goes_on = (first + R < T) & (
        tl.load(word_ptr + first + R, mask=first + R < T, other=-1) == word
    )
    whole = (word >= 0) & own & (goes_on == 0)
    rounded = total.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + word * D + d, rounded, mask=d < tl.where(whole, D, 0))
    tl.store(leaves_ptr + chunk * D + d, total, mask=d < tl.where(own & goes_on, D, 0))
    tl.store(came_ptr + chunk * D + d, total, mask=d < tl.where(own == 0, D, 0))


@triton.jit
def _join_kernel(
    word_ptr, sum_ptr, came_ptr, leaves_ptr, T, D, C,
    R: tl.constexpr, BD: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    end = (chunk + 1) * R
    word = tl.load(word_ptr + end - 1, mask=end < T, other=-2).to(tl.int64)
    goes_on = tl.load(word_ptr + end, mask=end < T, other=-1) == word
    came = tl.load(word_ptr + end - R - 1, mask=chunk > 0, other=-1) == word
    if goes_on & (came == 0):
        d = tl.program_id(1) * BD + tl.arange(0, BD)
        inside = d < D
        total = tl.load(leaves_ptr + chunk * D + d, mask=inside, other=0.0)
        part = chunk + 1 + tl.arange(0, G)
        more = goes_on
        while more:
            same = tl.load(word_ptr + part * R, mask=part < C, other=-1) == word
            here = same[:, None] & inside[None, :]
            total += tl.sum(tl.load(came_ptr + part[:, None] * D + d[None, :], here, 0.0), axis=0)
            more = tl.sum(same.to(tl.int32), axis=0) == G
            part += G
        tl.store(sum_ptr + word * D + d, total.to(sum_ptr.dtype.element_ty), mask=inside)


def sum_sorted_rows(rows_TD: Tensor, word_T: Tensor, order_T: Tensor, num_words: int) -> Tensor:
    """(V, D) sums in float32, rounded once; word_T ascends, and order_T tells whose row is where.

    Words without rows get zeros.
    """
    T, D = rows_TD.shape
    sum_VD = rows_TD.new_zeros(num_words, D)
    if T > 0 and D > 0:
        chunks = triton.cdiv(T, ROWS)
        came_CD, leaves_CD = (rows_TD.new_empty(chunks, D, dtype=torch.float32) for _ in range(2))
        width = min(FEATURES, triton.next_power_of_2(D))
        grid = (chunks, triton.cdiv(D, width))
        _walk_kernel[grid](
            rows_TD, word_T, order_T, sum_VD, came_CD, leaves_CD, T, D,
            R=ROWS, BD=width, num_warps=1,
        )  # fmt: skip
        _join_kernel[grid](
            word_T, sum_VD, came_CD, leaves_CD, T, D, chunks,
            R=ROWS, BD=width, G=PARTS, num_warps=4,
        )  # fmt: skip
    return sum_VD
