"""Dropout RNG: keep masks from a hash of (seed, row, column), recomputed and never stored.

An element (row r, column c) is dropped if (r ^ c) * (r | 1) mod 2^32 < p * 2^32, where r and c are
32-bit hashes of the row (with the seed) and of the column: one xor and one multiplication an
element. Forward and backward compute the same mask, and no mask is read or written. A counter-based
RNG such as Philox takes ten rounds of two wide multiplications, which for attention's probabilities
would cost more than attention itself, and which took the up GEMM of switch's experts from 59 to 250
us (H200).

Attention uses the paired form: one multiplication gives 16 random bits for each of two neighbouring
columns, the halves of a word, so that a packed pair of 16-bit values is masked in three
instructions.
"""

import triton
import triton.language as tl


def drop_threshold(dropout: float) -> int:
    """Return p in units of 2^-32, capped below 2^32 so that the scale 1 / (1 - p) is finite."""
    return min(round(dropout * 2**32), 2**32 - 1)


@triton.jit
def _fmix32(bits):
    """Return MurmurHash3's 32-bit finaliser: every bit of the result depends on all input bits."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def row_bits(seed, rows):
    """Return a 32-bit hash of each row and the seed."""
    hashed = (rows.to(tl.uint32) + 1) * 0x9E3779B1
    return _fmix32(_fmix32(hashed) ^ _fmix32(seed.to(tl.uint32) + 0x9E3779B9))


@triton.jit
def column_bits(cols):
    """Return a 32-bit hash of each column, the same for every seed."""
    return _fmix32((cols.to(tl.uint32) + 1) * 0x9E3779B1)


@triton.jit
def keep_mask(row, column, DROP_THRESHOLD: tl.constexpr):
    """Return the keep mask for row hashes and column hashes that broadcast.

    DROP_THRESHOLD is of `drop_threshold`. The multiplier depends on the row: with one multiplier
    for all rows, columns whose hashes differ in few bits would be dropped together in every row.
    """
    return ((row ^ column) * (row | 1)).to(tl.uint32, bitcast=True) >= DROP_THRESHOLD


@triton.jit
def keep_scale(seed_ptr, rows, cols, DROP_THRESHOLD: tl.constexpr):
    """Return (rows, cols) float32: 1 / (1 - p) where kept, else 0; same in forward and backward."""
    bits = row_bits(tl.load(seed_ptr), rows)
    keep = keep_mask(bits[:, None], column_bits(cols)[None, :], DROP_THRESHOLD)
    return tl.where(keep, 1.0 / (1.0 - DROP_THRESHOLD / 4294967296), 0.0)


def drop_threshold_paired(dropout: float) -> int:
    """Return p in units of 2^-32, rounded to 2^-16: each element of a pair has 16 random bits."""
    return min(round(dropout * 2**16), 2**16 - 1) << 16


@triton.jit
def pair_bits(pairs):
    """Return a 32-bit hash of each pair of columns.

    No two of 65,536 pairs have equal low halves; columns with equal ones would be dropped together
    in every row. (The low halves of a few in a hundred thousand pairs of columns differ by nearly
    2^15. One column of such a pair is kept a little more often where the other is dropped: their
    correlation is -0.11 at p = 0.1.)
    """
    low = ((pairs.to(tl.uint32) + 1) * 0x9E35) & 0xFFFF
    low = ((low ^ (low >> 8)) * 0xCA6B) & 0xFFFF
    return (column_bits(pairs) & 0xFFFF0000) | low ^ (low >> 7)


@triton.jit
def paired_column_bits(cols):
    """Return each column's `pair_bits`; even columns, which use the low half, shifted up by 16."""
    return pair_bits(cols // 2) << (16 - cols % 2 * 16).to(tl.uint32)


@triton.jit
def paired_row_terms(row):
    """Return the multiplier of the column hashes and the addend of both 16-bit halves, by row."""
    row = row.to(tl.uint32, bitcast=True)
    return row | 1, (row >> 16) * 0x10001


@triton.jit
def keep_mask_paired(row, column, DROP_THRESHOLD: tl.constexpr):
    """Return the keep mask for row hashes and `paired_column_bits`.

    DROP_THRESHOLD is of `drop_threshold_paired`. An element is dropped if its 16-bit half, read as
    an fp16 value, is among the lowest: from minus infinity, 0xFC00, on. A packed fp16 comparison
    can thus test both halves of a word in one instruction.
    """
    factor, term = paired_row_terms(row)
    lowest: tl.constexpr = (0xFC010000 - DROP_THRESHOLD) & 0xFFFFFFFF
    return factor * column.to(tl.uint32, bitcast=True) + (term - lowest) >= DROP_THRESHOLD


def packed_limit(drop_threshold: int) -> int:
    """Return the fp16 bound, in both halves of a signed 32-bit word, below which a half is dropped.

    The word is negative: drop_threshold is at most 0x7C00 * 2^16.
    """
    return (0xFC00 - (drop_threshold >> 16)) * 0x10001 - 2**32
