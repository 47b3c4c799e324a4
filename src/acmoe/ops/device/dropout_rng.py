"""The coins of dropout, by a hash: one xor and one product for each, and nothing is stored.

The generators of a library take ten rounds of two wide products, which for the probabilities of
attention would cost more than attention itself, and took the first product of switch's experts from
59 to 250 us (H200).

Attention tosses two coins with one product: the halves of a word. Neighbouring columns share one,
so that numbers packed two in a word are kept or dropped by three instructions.
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


def pair_threshold(dropout: float) -> int:
    """As `threshold`, but in whole 2^-16: a coin of a pair has 16 bits."""
    return min(round(dropout * 2**16), 2**16 - 1) << 16


@triton.jit
def pair_bits(pairs):
    """32 bits of each pair of columns. Of 65,536 pairs no two have equal low halves, which would
    fall together in every row. (Where they differ by nearly half of all, which a few in a hundred
    thousand do, one is kept a little more often where the other falls: correlation -0.11 for a
    share of 0.1.)
    """
    low = ((pairs.to(tl.uint32) + 1) * 0x9E35) & 0xFFFF
    low = ((low ^ (low >> 8)) * 0xCA6B) & 0xFFFF
    return (column_bits(pairs) & 0xFFFF0000) | low ^ (low >> 7)


@triton.jit
def paired_column_bits(cols):
    """Each column's own: shifted up in even ones, for theirs is the low half of the product."""
    return pair_bits(cols // 2) << (16 - cols % 2 * 16).to(tl.uint32)


@triton.jit
def paired_row_terms(row):
    """What a row's bits multiply those of columns by, and what they add to each half."""
    row = row.to(tl.uint32, bitcast=True)
    return row | 1, (row >> 16) * 0x10001


@triton.jit
def survives_paired(row, column, DROPPED: tl.constexpr):
    """`survives` for `paired_column_bits`. DROPPED: `pair_threshold`.

    Dropped are the halves that are, read as numbers of 16 bits, the lowest: from minus infinity,
    0xFC00, on. So one instruction can compare both halves of a word with a number.
    """
    factor, term = paired_row_terms(row)
    lowest: tl.constexpr = (0xFC010000 - DROPPED) & 0xFFFFFFFF
    return factor * column.to(tl.uint32, bitcast=True) + (term - lowest) >= DROPPED


def packed_limit(dropped: int) -> int:
    """The number, in both halves of a signed word, below which a half is dropped. It is negative:
    of `dropped` 0x7C00 * 2^16 are the most."""
    return (0xFC00 - (dropped >> 16)) * 0x10001 - 2**32
