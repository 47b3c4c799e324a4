"""Segmented sum of rows (T, D) by word id into (V, D), in a fixed order and without atomics.

Rows are sorted by word, so that the rows of a word are consecutive: a run. Two launches:
    chunk sums     one program per chunk of R sorted rows and block of features: it sums each run;
                   runs inside the chunk are final, parts of runs that cross its edges are set aside
    combine runs   one program per chunk: where a run begins in it and continues, add up its parts

So a long run (the blank of a byte corpus is a sixth of all rows) is spread over many programs.

Memory traffic: rows read once, V D numbers written once.

T rows, D features, V words, C chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, FEATURES = 16, 128  # per program; the rows of a chunk are read in sequence
PARTS = 32  # chunks of a long run that are added per step


@triton.jit
def _chunk_kernel(
    rows_ptr, word_ptr, perm_ptr, sum_ptr, head_ptr, tail_ptr, T, D,
    R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum the runs of one chunk.

    head: the chunk's part of a run that began in an earlier chunk. tail: its part of a run that
    began in it and continues in the next.
    """
    chunk = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = chunk * R
    word = tl.load(word_ptr + first).to(tl.int64)
    begins_here = word != tl.load(
        word_ptr + first - 1, mask=chunk > 0, other=-1
    )  # the run began in this chunk
    acc = tl.zeros((BD,), dtype=tl.float32)
    for step in range(R):
        t = first + step
        next_word = tl.load(word_ptr + t, mask=t < T, other=-1).to(tl.int64)
        ends = next_word != word
        rounded = acc.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + word * D + d, rounded, mask=d < tl.where(ends & begins_here, D, 0))
        tl.store(head_ptr + chunk * D + d, acc, mask=d < tl.where(ends & (begins_here == 0), D, 0))
        row = tl.load(perm_ptr + t, mask=t < T, other=0)
        value = tl.load(rows_ptr + row * D + d, mask=d < tl.where(t < T, D, 0), other=0.0)
        acc = tl.where(ends, 0.0, acc) + value.to(tl.float32)
        begins_here = begins_here | ends
        word = next_word
    # After the last row the word is -1, and its sum is not stored.
    continues = (first + R < T) & (
        tl.load(word_ptr + first + R, mask=first + R < T, other=-1) == word
    )
    complete = (word >= 0) & begins_here & (continues == 0)
    rounded = acc.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + word * D + d, rounded, mask=d < tl.where(complete, D, 0))
    tl.store(tail_ptr + chunk * D + d, acc, mask=d < tl.where(begins_here & continues, D, 0))
    tl.store(head_ptr + chunk * D + d, acc, mask=d < tl.where(begins_here == 0, D, 0))


@triton.jit
def _combine_kernel(
    word_ptr, sum_ptr, head_ptr, tail_ptr, T, D, C,
    R: tl.constexpr, BD: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Add up the parts of the run that begins in this chunk and continues, if any."""
    chunk = tl.program_id(0).to(tl.int64)
    end = (chunk + 1) * R
    word = tl.load(word_ptr + end - 1, mask=end < T, other=-2).to(tl.int64)
    continues = tl.load(word_ptr + end, mask=end < T, other=-1) == word
    began_earlier = tl.load(word_ptr + end - R - 1, mask=chunk > 0, other=-1) == word
    if continues & (began_earlier == 0):
        d = tl.program_id(1) * BD + tl.arange(0, BD)
        valid = d < D
        acc = tl.load(tail_ptr + chunk * D + d, mask=valid, other=0.0)
        part = chunk + 1 + tl.arange(0, G)
        more = continues
        while more:
            same = tl.load(word_ptr + part * R, mask=part < C, other=-1) == word
            valid_part = same[:, None] & valid[None, :]
            acc += tl.sum(
                tl.load(head_ptr + part[:, None] * D + d[None, :], valid_part, 0.0), axis=0
            )
            more = tl.sum(same.to(tl.int32), axis=0) == G
            part += G
        tl.store(sum_ptr + word * D + d, acc.to(sum_ptr.dtype.element_ty), mask=valid)


def sum_sorted_rows(rows_TD: Tensor, word_T: Tensor, order_T: Tensor, num_words: int) -> Tensor:
    """Return (V, D) sums by word, added in float32 and rounded once; zeros for words without rows.

    word_T: ascending word ids. order_T: the row of rows_TD that belongs to each sorted word.
    """
    T, D = rows_TD.shape
    sum_VD = rows_TD.new_zeros(num_words, D)
    if T > 0 and D > 0:
        chunks = triton.cdiv(T, ROWS)
        head_CD, tail_CD = (rows_TD.new_empty(chunks, D, dtype=torch.float32) for _ in range(2))
        width = min(FEATURES, triton.next_power_of_2(D))
        grid = (chunks, triton.cdiv(D, width))
        _chunk_kernel[grid](
            rows_TD, word_T, order_T, sum_VD, head_CD, tail_CD, T, D,
            R=ROWS, BD=width, num_warps=1,
        )  # fmt: skip
        _combine_kernel[grid](
            word_T, sum_VD, head_CD, tail_CD, T, D, chunks,
            R=ROWS, BD=width, G=PARTS, num_warps=4,
        )  # fmt: skip
    return sum_VD
