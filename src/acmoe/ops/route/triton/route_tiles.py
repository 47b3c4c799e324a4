"""Tiles, launch options and accuracy of the kernel in route.py.

T tokens, D features, E experts. Names such as olmoe are benchmark shapes (lab/bench/shapes.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.ops.device.launcher import next_power_of_2
from acmoe.ops.route.triton.rescale import MANY_EXPERTS
from acmoe.ops.route.triton.tokens import Tokens

# bf16 GEMMs per GEMM with a 16-bit token (ops/device/dot.py). An unscaled bf16 token loses nothing,
# and a scale of one changes no bit. An unsorted token that is rescaled becomes a bf16x2 split: its
# affinities are off by 2^-18 of their size (root mean square), where a sequential float32 sum over
# 2048 features is off by 2^-20 and the token's own rounding moves them by 2^-10.
TERMS_16_BIT = 4
# With sorted bf16 tokens and a bf16 embedding the rescaled operand is a bf16x2 split and the other
# one stays bf16: at most 2^-18 of each product is lost. A bf16x3 split would cost 31 us at qwen30b
# and 1.5 at switch, of 197 and 16.5 (H200).
TERMS_SORTED_BF16 = 3
# So few tokens leave multiprocessors without a program, and each program waits for its loads: as
# many stages as fit into STAGE_BYTES.
FEW_TOKENS, FEW_STAGES, STAGE_BYTES = 4096, 8, 88 * 1024
LOW_TOKENS = 16  # so few are one block of tokens
# BD, the features of one step of the sums, the same with and without a scale: it decides the order
# of additions, and a scale of one must not change a bit. STEP_BF16 where tokens and embedding are
# bf16: 86 us against 96 with 32; with a scale 180 against 199 (qwen30b, H200). Otherwise STEP:
# tensor cores truncate the sums within a step, and float32 tokens would lose 2^-20.
STEP, STEP_BF16 = 32, 64
# Sizes of a program that only selects among few tokens: the most affinities, and the most tokens
# where one program has all of them and where there are several programs. With 16 instead of 64
# tokens a program, a router with the balance loss takes 12.1 instead of 15.5 us for 1,024 tokens
# (olmoe), 16.0 instead of 22.0 (the same with 128 experts), and 14.3 instead of 13.6 us for 2,048
# tokens of gptoss (H200, captured, a script that was not kept).
_ELEMENTS, _TOKENS_OF_ONE, _TOKENS_OF_MANY = 8192, 64, 16


class Tile(NamedTuple):
    """BT, the tokens of a block, and launch options of the kernel."""

    tokens: int
    num_warps: int
    num_stages: int
    registers: int | None = None


def step_size(x_TD: Tensor, embedding_ED: Tensor) -> int:
    """Return BD for tokens and an embedding of these dtypes."""
    return STEP_BF16 if x_TD.dtype == embedding_ED.dtype == torch.bfloat16 else STEP


def launch_table(
    num_experts: int, num_tokens: int, unsorted: bool, is_float32: bool, both_bf16: bool
) -> Tile:
    """Choose the tile: a program keeps its (BT, E) affinities in registers, so BT falls with E.

    Short steps or few programs need more loads in flight: with STEP mixtral's 8192 tokens take 38
    us with 8 stages and 48 with 5. The same holds where 128 experts leave one program per
    multiprocessor, again with STEP; float32 tokens get 3 stages there, because 5 would exceed
    the 99 KiB of shared memory that a program has on smaller cards. Sorted tokens wait for two
    dependent loads and prefer three programs per multiprocessor, although some registers spill.

    Few tokens (FEW_TOKENS) have few programs, which get more stages; LOW_TOKENS are one program.

    With more than MANY_EXPERTS the kernel only selects. One warp needs no barrier to compare all
    experts of a token: 52 us, against 107 with 16 tokens and 8 warps (qwen3next).
    """
    if num_experts > MANY_EXPERTS:
        return Tile(4, 1, 2)
    if unsorted and both_bf16 and num_tokens <= FEW_TOKENS:
        tokens = LOW_TOKENS if num_tokens <= LOW_TOKENS else 64
        # 2 bytes a number, and 4 for a scale; 64 tokens with one get fewer stages (`choose_tile`).
        size = 6 if tokens == LOW_TOKENS else 2
        stage = STEP_BF16 * (size * tokens + 2 * max(16, next_power_of_2(num_experts)))
        stages = max(2, min(FEW_STAGES, STAGE_BYTES // stage))
        return Tile(tokens, 4, stages)
    if both_bf16:
        return Tile(64, 4, 6 if num_experts <= 16 and num_tokens <= 2**14 else 3)
    if num_experts <= 16:
        return Tile(64, 4, 8 if num_tokens <= 2**14 else 5)
    if unsorted and num_tokens >= 2**15:
        return Tile(128, 8, 3 if is_float32 else 5)
    return Tile(64, 4, 3, 168 if num_experts > 64 and not unsorted else None)


def terms(tokens: Tokens, both_bf16: bool) -> int:
    """Return TERMS of `accurate_dot`: the number of bf16 GEMMs that make up one float32 GEMM."""
    if tokens.is_sorted and both_bf16:
        return TERMS_SORTED_BF16
    sorted_bf16 = tokens.x.dtype == torch.bfloat16 and tokens.is_sorted
    return 6 if sorted_bf16 or tokens.x.dtype == torch.float32 else TERMS_16_BIT


def choose_tile(
    tokens: Tokens, num_experts: int, in_ranges: bool, both_bf16: bool, totals: str
) -> Tile:
    """Return the tile of `launch_table`, changed where a scale or the balance loss require it.

    Sorted tokens of few experts have 2 warps, if nobody reads the sums of the balance loss: 9.2 us
    instead of 10.1 at switch, 8.9 instead of 9.8 at swin, 36 instead of 44 at mixtral (H200,
    captured, a script that was not kept). The plain router has 4 warps; with a scale of one both
    gave the same bits in all of 2.9 million affinities.

    in_ranges: the features are summed in ranges (few_tokens.py), and the kernel only selects.
    """
    is_float32 = tokens.x.dtype == torch.float32
    tile = launch_table(num_experts, tokens.x.shape[0], not tokens.is_sorted, is_float32, both_bf16)
    if in_ranges:
        return _selecting_tile(num_experts, tokens.x.shape[0], totals)
    if tokens.is_sorted and both_bf16 and num_experts <= 16 and totals == "none":
        return Tile(64, 2, 4)
    if tokens.is_sorted and is_float32 and num_experts <= 16 and tokens.x.shape[0] > 2**14:
        return Tile(64, 4, 3)  # 19.6 us instead of 20.8 (switch, H200)
    if tokens.has_scale and not tokens.is_sorted and tile.tokens > LOW_TOKENS:
        # The scale of each token is prefetched as well: 6 stages would exceed the 99 KiB of shared
        # memory that a program has on smaller cards.
        tile = tile._replace(num_stages=min(tile.num_stages, 3))
    if num_experts > MANY_EXPERTS and totals in ("balance", "shares"):
        # One program adds up the sums of all others: let these be few.
        tile = tile._replace(tokens=16, num_warps=8)
    return tile


def _selecting_tile(num_experts: int, num_tokens: int, totals: str) -> Tile:
    """Return the tile of a kernel that only selects, for few tokens: latency is all that counts.

    Without sums over tokens (`totals`) a program has one token. Otherwise the sums of different
    programs must be added, so that programs have many tokens: one for each warp and more, because
    a warp needs no barrier to compare the experts of a token. With 4 warps for all, 64 tokens of
    olmoe took 10 us and one token 4.4 (H200, captured).
    """
    if totals == "none":
        return Tile(1, 1, 2)
    experts = max(16, next_power_of_2(num_experts))
    most = _TOKENS_OF_ONE if num_tokens <= _TOKENS_OF_ONE else _TOKENS_OF_MANY
    tokens = min(most, _ELEMENTS // experts, next_power_of_2(num_tokens))
    return Tile(tokens, min(16, tokens, max(1, tokens * experts // 256)), 2)
