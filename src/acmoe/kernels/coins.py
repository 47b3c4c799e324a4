"""The coins of dropout, by a hash: one xor and one product for each, and nothing is stored.

The generators of a library take ten rounds of two wide products, which for the probabilities of
attention would cost more than attention itself, and took the first product of switch's experts from
59 to 250 us (H200).
"""

import triton
import triton.language as tl


def threshold(dropout: float) -> int:
    """The share that is dropped, in 2^-32; never all of it, for what is kept counts 1 / (1 - p)."""
    return min(round(dropout * 2**32), 2**32 - 1)


@triton.jit
def _mixed(bits):
    """Two rounds of multiply and shift: every bit of the result hangs on all given."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def row_bits(seed, rows):
    """32 bits of each row's own in this draw."""
    place = (rows.to(tl.uint32) + 1) * 0x9E3779B1
    return _mixed(_mixed(place) ^ _mixed(seed.to(tl.uint32) + 0x9E3779B9))


@triton.jit
def column_bits(cols):
    """32 bits of each column's own, the same in every draw."""
    return _mixed((cols.to(tl.uint32) + 1) * 0x9E3779B1)


@triton.jit
def survives(row, column, DROPPED: tl.constexpr):
    """Where a number is kept, for bits of rows and columns that broadcast. DROPPED: `threshold`.

    The factor is the row's own: with one factor for all, columns whose bits differ in few places
    would fall together in every row.
    """
    return ((row ^ column) * (row | 1)).to(tl.uint32, bitcast=True) >= DROPPED


@triton.jit
def keep_tile(seed_ptr, rows, cols, DROPPED: tl.constexpr):
    """(rows, columns) 1 / (1 - p) where kept, else 0; the same in forward and backward."""
    bits = row_bits(tl.load(seed_ptr), rows)
    kept = survives(bits[:, None], column_bits(cols)[None, :], DROPPED)
    return tl.where(kept, 1.0 / (1.0 - DROPPED / 4294967296), 0.0)
