"""Dropout of attention weights on Hopper, two 16-bit elements per 32-bit word.

Inline PTX computes the RNG bits of a pair of neighbouring keys with one multiply-add, compares both
16-bit halves with the dropout threshold, and applies the keep mask to both elements: three
instructions for two weights. The random numbers are those of `keep_mask_paired` in
ops/device/dropout_rng.py, so this kernel and the Triton kernel drop the same elements.

`pair_bits_kernel` precomputes the bits of all pairs of keys (N / 2 words) before a forward launch,
one program per block of pairs, and each warpgroup of the forward kernel loads them tile by tile.

Shapes as in forward.py.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from acmoe.ops.attention.hopper.staging import KEYS, SCORE
from acmoe.ops.device.dropout_rng import pair_bits, paired_row_terms

row_terms = gluon.jit(paired_row_terms.fn)
# $0 = keep mask & weights. $1: two weights, $2: row factor, $4: bits of the pair, $6: row term,
# $8: threshold in both halves. `set` compares the halves as f16 numbers; see `keep_mask_paired`.
DROPOUT_ASM = gl.constexpr(
    "{ .reg .b32 keep; mad.lo.u32 keep, $2, $4, $6; set.geu.u32.f16x2 keep, keep, $8;"
    " and.b32 $0, $1, keep; }"
)
# $1 = keep mask & weights; $0 holds the two weights with the sign bit set where they are dropped.
SIGNED_DROPOUT_ASM = gl.constexpr(
    "{ .reg .b32 keep; mad.lo.u32 keep, $3, $5, $7; set.geu.u32.f16x2 keep, keep, $9;"
    " lop3.b32 $0, $2, keep, 0x80008000, 0xF2; and.b32 $1, $2, keep; }"
)
_PAIR_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4]],
        lane_bases=[[8], [16], [0], [0], [0]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[32],
    )
)  # 8 consecutive pairs per thread


@triton.jit
def pair_bits_kernel(bits_ptr, num, BN: tl.constexpr):
    """Store the RNG bits of all pairs of keys.

    Inside each tile of 64 keys, the pairs are in the order in which threads hold their scores.
    """
    index = tl.program_id(0) * BN + tl.arange(0, BN)
    pair = index // 32 * 32 + index % 8 * 4 + index % 32 // 8
    tl.store(bits_ptr + index, pair_bits(pair).to(tl.int32, bitcast=True), mask=index < num)


@gluon.jit
def load_pair_bits(bits_ptr):
    """Load the bits of a tile's 32 pairs as (64,), each twice, in the column layout of SCORE.

    Both elements of a packed word use the bits of their pair.
    """
    pairs = gl.load(bits_ptr + gl.arange(0, KEYS // 2, _PAIR_LAYOUT))
    pairs = pairs.reshape([4, 8]).permute([1, 0]).reshape([KEYS // 2])
    both = gl.join(pairs, pairs).reshape([KEYS])
    return gl.convert_layout(both, gl.SliceLayout(0, SCORE), assert_trivial=True)


@gluon.jit
def apply_dropout(weight, factor, term, pairs, limit):
    """Return the (64, 64) weights with zeros where they are dropped.

    factor and term (64,) are the `row_terms` of the queries, pairs (64,) the bits of the keys, and
    limit is `packed_limit`.
    """
    return gl.inline_asm_elementwise(
        DROPOUT_ASM, "=r,r,r,r,r,r,r,r,r,r",
        [weight, factor[:, None], pairs[None, :], term[:, None], limit],
        weight.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def apply_signed_dropout(weight, factor, term, pairs, limit):
    """Return the weights twice: with the sign bit set where dropped, and with zeros there.

    The arguments are those of `apply_dropout`.
    """
    return gl.inline_asm_elementwise(
        SIGNED_DROPOUT_ASM, "=&r,=r,r,r,r,r,r,r,r,r,r",
        [weight, factor[:, None], pairs[None, :], term[:, None], limit],
        (weight.dtype, weight.dtype), is_pure=True, pack=2,
    )  # fmt: skip
