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
from acmoe.ops.route.triton.rescale import worth_rescaling
from acmoe.ops.route.triton.tokens import Tokens

MOST_TOKENS = 1024
# Tokens, experts, warps and stages of a tile; the low one is for up to LOW_TOKENS.
LOW_TOKENS, LOW_TILE, TILE = 64, (16, 32, 4, 4), (32, 64, 4, 3)
# About one program for each multiprocessor; a range of fewer features is not worth a program.
PROGRAMS, FEWEST_FEATURES = 128, 256


def num_ranges(tokens: Tokens, num_experts: int) -> int:
    """Return S; 1 if a program should take all features (route.py, many_experts.py)."""
    T, D = tokens.x.shape
    if tokens.is_sorted or T > MOST_TOKENS or worth_rescaling(tokens, num_experts):
        return 1
    height, width, *_ = _tile(T)
    programs = cdiv(T, height) * cdiv(num_experts, width)
    ranges = 1
    while 2 * ranges * programs <= PROGRAMS and 2 * ranges * FEWEST_FEATURES <= D:
        ranges *= 2
    return ranges


def partial_affinities(
    tokens: Tokens, embedding_ED: Tensor, ranges: int, terms: int, step: int
) -> Tensor:
    """Return the (S, T, E) float32 sums over each range of features, without bias and noise.

    terms: TERMS of `accurate_dot`; step: the features of one step.
    """
    (T, D), E = tokens.x.shape, embedding_ED.shape[0]
    partial_STE = tokens.x.new_empty(ranges, T, E, dtype=torch.float32)
    height, width, num_warps, num_stages = _tile(T)
    launch(
        affinity_kernel, (cdiv(E, width), tokens.blocks(height), ranges), *tokens.pointers,
        embedding_ED.contiguous(), embedding_ED, partial_STE, partial_STE, T, D, E,
        tokens.scale.shape[0], HAS_BIAS=False, HAS_NOISE=False, TERMS=terms, **tokens.flags,
        SPLIT=False, RANGE=cdiv(cdiv(D, ranges), step) * step, BT=height, BD=step, BE=width,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return partial_STE


def _tile(num_tokens: int) -> tuple[int, int, int, int]:
    return LOW_TILE if num_tokens <= LOW_TOKENS else TILE
