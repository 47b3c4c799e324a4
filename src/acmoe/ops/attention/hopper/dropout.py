"""Dropout of packed weights on Hopper: two numbers of 16 bits and their two coins in one word each.

The coins are those of coins.py, `survives_paired`. Shapes as in attention_hopper.py.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from acmoe.ops.attention.hopper.staging import KEYS, SCORE
from acmoe.ops.device.dropout_rng import pair_bits, paired_row_terms

row_terms = gluon.jit(paired_row_terms.fn)
# Two numbers of 16 bits, and their two coins: see `survives_paired`.
TOSS = gl.constexpr(
    "{ .reg .b32 coin; mad.lo.u32 coin, $2, $4, $6; set.geu.u32.f16x2 coin, coin, $8;"
    " and.b32 $0, $1, coin; }"
)
# The same, and before it the two numbers with the sign bit set where they fall.
SIGN = gl.constexpr(
    "{ .reg .b32 coin; mad.lo.u32 coin, $3, $5, $7; set.geu.u32.f16x2 coin, coin, $9;"
    " lop3.b32 $0, $2, coin, 0x80008000, 0xF2; and.b32 $1, $2, coin; }"
)
_SPREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4]],
        lane_bases=[[8], [16], [0], [0], [0]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[32],
    )
)  # 8 pairs a thread, side by side


@triton.jit
def pairs_kernel(spread_ptr, num, BN: tl.constexpr):
    """Bits of pairs of keys, those of a tile in the order in which threads hold its scores."""
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    pair = at // 32 * 32 + at % 8 * 4 + at % 32 // 8
    tl.store(spread_ptr + at, pair_bits(pair).to(tl.int32, bitcast=True), mask=at < num)


@gluon.jit
def pairs_of(spread_ptr):
    """A tile's bits, twice: a pair of scores lies in one word, and has them in common."""
    pairs = gl.load(spread_ptr + gl.arange(0, KEYS // 2, _SPREAD))
    pairs = pairs.reshape([4, 8]).permute([1, 0]).reshape([KEYS // 2])
    both = gl.join(pairs, pairs).reshape([KEYS])
    return gl.convert_layout(both, gl.SliceLayout(0, SCORE), assert_trivial=True)


@gluon.jit
def dropped_out(weight, factor, term, pairs, limit):
    return gl.inline_asm_elementwise(
        TOSS, "=r,r,r,r,r,r,r,r,r,r",
        [weight, factor[:, None], pairs[None, :], term[:, None], limit],
        weight.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def signed_and_dropped_out(weight, factor, term, pairs, limit):
    """The weights with a sign where they fall, and with zeros there."""
    return gl.inline_asm_elementwise(
        SIGN, "=&r,=r,r,r,r,r,r,r,r,r,r",
        [weight, factor[:, None], pairs[None, :], term[:, None], limit],
        (weight.dtype, weight.dtype), is_pure=True, pack=2,
    )  # fmt: skip
