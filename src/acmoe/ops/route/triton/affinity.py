"""The affinities of tokens and experts, a tile at a time: the router's GEMM with float32 accuracy.

    affinity_te = sum_d x_td * scale[cluster of t]_d * embedding_ed + bias_e + noise_te

T tokens, D features, E experts, C clusters.
"""

import triton
import triton.language as tl

from acmoe.ops.device.dot import accurate_dot, split_bf16
from acmoe.ops.route.triton.tokens import (
    load_cluster_ends,
    load_scale,
    load_scaled,
    load_split,
    load_tokens,
)


@triton.jit
def _product(
    x_ptr, scale_ptr, cluster, embedding_ptr, t, row, unmasked, e, first, last, D, E,
    HAS_SCALE: tl.constexpr, SORTED: tl.constexpr, SPLIT: tl.constexpr, PLAIN_BF16: tl.constexpr,
    TERMS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Return x * scale @ embedding^T of a block, (BT, BE) float32, over features first to last - 1.

    SPLIT: x is x * scale.
    """
    acc = tl.zeros((BT, BE), dtype=tl.float32)
    # A bf16 operand that is not rescaled goes to the tensor cores as it is; any other one becomes a
    # bf16 split. If tokens are sorted, and they and the embedding are bf16, the operand with the
    # smaller tile is rescaled. The split of a bf16 embedding that is not rescaled would add terms
    # that are zeros: it is omitted, whatever the tokens are.
    WEIGHT_BF16: tl.constexpr = embedding_ptr.dtype.element_ty == tl.bfloat16
    SPLIT_X: tl.constexpr = WEIGHT_BF16 and PLAIN_BF16 and SORTED and BE >= BT
    SPLIT_WEIGHT: tl.constexpr = not WEIGHT_BF16 or (SORTED and not SPLIT_X)
    for start in range(first, last, BD):
        d = start + tl.arange(0, BD)
        if SPLIT:
            x_high, x_middle = load_split(x_ptr, row, unmasked, d, D, BT)
            x_low = x_high  # not read
        else:
            x = load_scaled(
                x_ptr, scale_ptr, cluster, t, row, unmasked, d, D, HAS_SCALE, SORTED, BT
            )
        valid = (d[:, None] < D) & (e[None, :] < E)
        weight = tl.load(embedding_ptr + e[None, :] * D + d[:, None], mask=valid, other=0.0)
        weight = weight.to(tl.float32)
        if SORTED:
            scale = load_scale(scale_ptr, cluster, d, D)
            if SPLIT_X:
                x *= scale[None, :]
            else:
                weight *= scale[:, None]
        if not SPLIT:
            x_high, x_middle, x_low = split_bf16(x, PLAIN_BF16 and not SPLIT_X)
        high, middle, low = split_bf16(weight, not SPLIT_WEIGHT)
        acc += accurate_dot(
            x_high, x_middle, x_low, high, middle, low, PLAIN_BF16 and not SPLIT_X,
            not SPLIT_WEIGHT, TERMS,
        )  # fmt: skip
    return acc


@triton.jit
def affinity_block(
    x_ptr, scale_ptr, cluster, embedding_ptr, bias_ptr, noise_ptr, t, row, in_bounds, unmasked, e,
    first, last, D, E, HAS_BIAS: tl.constexpr, HAS_NOISE: tl.constexpr, HAS_SCALE: tl.constexpr,
    SORTED: tl.constexpr, SPLIT: tl.constexpr, PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Return x * scale @ embedding^T + bias + noise of a block, (BT, BE) float32.

    first, last: the range of features in the sum, 0 and D for all.
    """
    affinity = _product(
        x_ptr, scale_ptr, cluster, embedding_ptr, t, row, unmasked, e, first, last, D, E, HAS_SCALE,
        SORTED, SPLIT, PLAIN_BF16, TERMS, BT, BD, BE,
    )  # fmt: skip
    return add_bias_noise(
        affinity, bias_ptr, noise_ptr, t, in_bounds, e, E, HAS_BIAS, HAS_NOISE
    )  # fmt: skip


@triton.jit
def add_bias_noise(
    affinity, bias_ptr, noise_ptr, t, in_bounds, e, E, HAS_BIAS: tl.constexpr,
    HAS_NOISE: tl.constexpr,
):  # fmt: skip
    """Return affinity (BT, BE) + bias + noise, as far as there are any."""
    if HAS_BIAS:
        affinity += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    if HAS_NOISE:
        offs = t.to(tl.int64)[:, None] * E + e[None, :]
        valid = in_bounds[:, None] & (e[None, :] < E)
        affinity += tl.load(noise_ptr + offs, mask=valid, other=0.0)
    return affinity


@triton.jit
def affinity_kernel(
    x_ptr, scale_ptr, cluster_ptr, mask_ptr, perm_ptr, embedding_ptr, bias_ptr, noise_ptr,
    affinity_ptr, T, D, C, E: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NOISE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_MASK: tl.constexpr, SORTED: tl.constexpr,
    SPLIT: tl.constexpr, RANGE: tl.constexpr, PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the affinities of a block of tokens with a block of experts.

    Consecutive programs share the tokens. RANGE: 0, or the features of one range of the sums; then
    those of range s are stored (S, T, E).
    """
    start = tl.program_id(1) * BT
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    t, in_bounds, unmasked, cluster = load_tokens(
        cluster_ptr, mask_ptr, perm_ptr, load_cluster_ends(cluster_ptr, C, BC), start, T, C,
        HAS_SCALE, HAS_MASK, SORTED, BT, BC,
    )  # fmt: skip
    if SORTED:
        if tl.max(t) < 0:  # the block has padding slots only
            return
    first = 0
    last = D
    if RANGE > 0:
        first = tl.program_id(2) * RANGE
        last = tl.minimum(first + RANGE, D)
        affinity_ptr += tl.program_id(2).to(tl.int64) * T * E
    affinity = affinity_block(
        x_ptr, scale_ptr, cluster, embedding_ptr, bias_ptr, noise_ptr, t, start.to(tl.int64),
        in_bounds, unmasked, e, first, last, D, E, HAS_BIAS, HAS_NOISE, HAS_SCALE, SORTED, SPLIT,
        PLAIN_BF16, TERMS, BT, BD, BE,
    )  # fmt: skip
    offs = t.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(affinity_ptr + offs, affinity, mask=in_bounds[:, None] & (e[None, :] < E))
