"""Multiply tokens by their scale once, for GEMMs with so many experts that each tile would anew.

    y_td = x_td * scale[cluster of t]_d    as a bf16x2 split (ops/device/dot.py), or one bf16 number

A GEMM's program owns a block of tokens and a block of experts. Where it rescales the tokens itself,
every block of experts loads their float32 scales and splits the products again: with 512 experts
the affinities took 272 us instead of 87 (16,384 tokens of 2,048 features, H200). Here x is read
once and the parts are written once, 3 times the bytes of x for a split and 2 for one number, and
the GEMM reads 16-bit operands as they are. The split is the one that the GEMM itself makes.

T tokens, D features, C clusters, Z parts.
"""

import torch
import triton
import triton.language as tl

from acmoe.ops.device.dot import round_to_bf16
from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2
from acmoe.ops.route.triton.tokens import Tokens, load_scaled, load_tokens

# Experts above which the affinities have a kernel of their own (route.py). With 256 in one program
# of 8 warps the two terms of a rescaled token get different register layouts, and 64 x 256 sums go
# through shared memory in every step.
MANY_EXPERTS = 128
FEWEST_TOKENS = 1024  # with fewer a launch costs more than it saves
_TOKENS, _FEATURES, _WARPS = 2, 2048, 8  # each for one program


def worth_rescaling(tokens: Tokens, num_experts: int) -> bool:
    """Return True if the tokens should be rescaled before the GEMMs with all experts.

    A block of sorted tokens has one scale, which a GEMM loads with little effort; float32 tokens
    would need three parts, 6 bytes for each 4 of x.
    """
    return (
        num_experts > MANY_EXPERTS
        and tokens.has_scale
        and not tokens.is_sorted
        and tokens.x.dtype != torch.float32
        and tokens.x.shape[0] >= FEWEST_TOKENS
    )


def rescaled(tokens: Tokens, num_parts: int) -> Tokens:
    """Return unsorted tokens with their scale multiplied in, zeros where they are masked.

    num_parts: 2 for a bf16x2 split, x (T, 2 * D) with the high parts of a token before its low
    ones (`is_split`); 1 for x * scale rounded to bf16, x (T, D).
    """
    T, D = tokens.x.shape
    out = tokens.x.new_empty(T, num_parts * D, dtype=torch.bfloat16)
    width = min(_FEATURES, next_power_of_2(D))
    launch(
        _rescale_kernel, (cdiv(T, _TOKENS), cdiv(D, width)), *tokens.pointers, out, T, D,
        tokens.scale.shape[0], HAS_MASK=tokens.has_mask, PARTS=num_parts, BT=_TOKENS, BD=width,
        num_warps=_WARPS,
    )  # fmt: skip
    return tokens.in_place()._replace(x=out, is_split=num_parts == 2)


@triton.jit
def _rescale_kernel(
    x_ptr, scale_ptr, cluster_ptr, mask_ptr, perm_ptr, out_ptr, T, D, C, HAS_MASK: tl.constexpr,
    PARTS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the parts of BT tokens at BD features."""
    start = tl.program_id(0) * BT
    row = start.to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    t, in_bounds, unmasked, cluster = load_tokens(
        cluster_ptr, mask_ptr, perm_ptr, C, start, T, C, True, HAS_MASK, False, BT, 0
    )
    y = load_scaled(x_ptr, scale_ptr, cluster, t, row, unmasked, d, D, True, False, BT)
    high = tl.where(y == y, round_to_bf16(y), y)  # rounding by bits may lose a NaN
    out_ptr += row * PARTS * D + tl.arange(0, BT)[:, None] * (PARTS * D) + d[None, :]
    valid = in_bounds[:, None] & (d[None, :] < D)
    tl.store(out_ptr, high.to(tl.bfloat16), mask=valid)
    if PARTS == 2:
        tl.store(out_ptr + D, round_to_bf16(y - high).to(tl.bfloat16), mask=valid)
