"""The affinities of few tokens: every program sums over a range of the features only.

    partial_ste = sum over the features d of range s of x_td * scale[cluster of t]_d * embedding_ed

A program for each block of tokens would leave most multiprocessors idle, and load one step of the
features after the other: one token of olmoe took 12 us, and 28 with a scale (H200, captured). The
kernel that selects (route.py) adds the ranges in their order, so that equal inputs give equal bits.

T tokens, D features, E experts, S ranges of features.
"""

import torch
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch
from acmoe.ops.route.triton.affinity import affinity_kernel
from acmoe.ops.route.triton.rescale import FEWEST_TOKENS, MANY_EXPERTS
from acmoe.ops.route.triton.route_tiles import step_size
from acmoe.ops.route.triton.tokens import Tokens

# The features of more tokens are not split. With more than MANY_EXPERTS such tokens may be rescaled
# before the GEMM (rescale.py).
MOST_TOKENS = FEWEST_TOKENS - 1
# This limit replaces MOST_TOKENS for up to MANY_EXPERTS and FEWEST_SPLIT features or more. Adaptive
# routers of 1,024 and 2,048 tokens take 25 and 31 us instead of 48 and 49 (olmoe), 23 and 33
# instead of 57 and 58 (gptoss); plain ones 18 and 20 instead of 19 (olmoe). With 8 experts and
# 2,048 tokens, which would otherwise be sorted, they take 40 instead of 38. 4,096 tokens take as
# long either way, and 352 features longer (H200, a script that was not kept).
MOST_OF_FEW_EXPERTS, FEWEST_SPLIT = 2048, 1024
# Tokens, experts, warps and stages of a tile; the low one is for up to LOW_TOKENS.
LOW_TOKENS, LOW_TILE, TILE = 64, (16, 32, 4, 4), (32, 64, 4, 3)
# About one program for each multiprocessor, and two where there are more than MOST_TOKENS. A range
# of fewer features is not worth a program, and the kernel that selects has to load every range.
PROGRAMS, FEWEST_FEATURES, MOST_RANGES = 128, 64, 16


def range_size(x_TD: Tensor, embedding_ED: Tensor) -> int:
    """Return the features of a range, a multiple of those that a program loads at a time.

    It is D or more if a program should take all features (route.py, many_experts.py). It does not
    depend on the scale: the order of additions is the same with and without one, and a scale of one
    changes no bit.
    """
    (T, D), E = x_TD.shape, embedding_ED.shape[0]
    most = MOST_OF_FEW_EXPERTS if E <= MANY_EXPERTS and D >= FEWEST_SPLIT else MOST_TOKENS
    if not 0 < T <= most:
        return D
    height, width, *_ = _tile(T)
    blocks = cdiv(T, height) * cdiv(E, width)
    programs = PROGRAMS if T <= MOST_TOKENS else 2 * PROGRAMS
    ranges = min(MOST_RANGES, D // FEWEST_FEATURES, programs // blocks)
    step = step_size(x_TD, embedding_ED)
    return cdiv(cdiv(D, max(1, ranges)), step) * step


def in_ranges(x_TD: Tensor, embedding_ED: Tensor) -> bool:
    """Return True if the features are split; the tokens are then read in their own order."""
    return range_size(x_TD, embedding_ED) < x_TD.shape[1]


def partial_affinities(
    tokens: Tokens, embedding_ED: Tensor, size: int, terms: int, step: int
) -> Tensor:
    """Return the (S, T, E) float32 sums over ranges of `size` features, without bias and noise.

    terms: TERMS of `accurate_dot`; step: the features that a program loads at a time.
    """
    (T, D), E = tokens.x.shape, embedding_ED.shape[0]
    ranges = cdiv(D, size)
    partial_STE = tokens.x.new_empty(ranges, T, E, dtype=torch.float32)
    height, width, num_warps, num_stages = _tile(T)
    launch(
        affinity_kernel, (cdiv(E, width), tokens.blocks(height), ranges), *tokens.pointers,
        embedding_ED.contiguous(), embedding_ED, partial_STE, partial_STE, T, D,
        tokens.scale.shape[0], E=E, HAS_BIAS=False, HAS_NOISE=False, TERMS=terms, **tokens.flags,
        SPLIT=False, RANGE=size, BT=height, BD=step, BE=width,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return partial_STE


def _tile(num_tokens: int) -> tuple[int, int, int, int]:
    return LOW_TILE if num_tokens <= LOW_TOKENS else TILE
