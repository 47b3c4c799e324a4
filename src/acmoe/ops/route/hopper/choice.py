"""Decide whether the router's Hopper kernels serve a call."""

import torch
from torch import Tensor

from acmoe.ops.device.hopper import gluon_unsupported
from acmoe.ops.device.launcher import cdiv, multiprocessors
from acmoe.ops.route.triton.tokens import Tokens

# With fewer tokens there is no tile of 128 for each multiprocessor. Affinities of scaled tokens and
# 512 experts on an H200, by Triton and here: 16,384 tokens take 195 and 118 us. 4,096 tokens took
# 56 and 71 us, when this kernel was slower (145 us for 16,384).
FEWEST_TOKENS = 8192
BLOCK, ALIGNMENT = 64, 8  # features of a block; TMA needs rows of a multiple of 16 bytes
# Experts and choices of `router_unsupported`. A program compares all experts once for each choice.
ROUTED_EXPERTS, MOST_CHOICES = range(33, 129), 16
# Tiles of 128 tokens per multiprocessor from which router.py is worth it, where each has one tile,
# and where the last round of several has to be nearly full. An H200 has 132. Triton's kernel and
# this one at qwen30b, with a scale: 16,384 tokens take 112 and 66 us, 20,480 take 120 either way,
# 32,768 take 169 and 122; without one 40 and 40, 62 and 71, 76 and 76. At olmoe, with a scale: 70
# and 49, 84 and 84, 109 and 92; without 32 and 30, 38 and 48, 53 and 56. 8,192 tokens at olmoe take
# 43 and 38 with a scale, but 16 and 20 without one.
TILE, ONE_ROUND, FULL_ROUNDS = 128, 0.6, 0.9


def router_unsupported(
    x_TD: Tensor, embedding_ED: Tensor, mask: Tensor | None, top_k: int
) -> str | None:
    """Return the reason why the router in one kernel (router.py) cannot or should not run, or None.

    It does not depend on the scale: one kernel serves the plain router and the adaptive one, so
    that a scale of one changes no bit.
    """
    (T, D), E = x_TD.shape, embedding_ED.shape[0]
    if x_TD.dtype != torch.bfloat16 or embedding_ED.dtype != torch.bfloat16:
        return f"it takes bfloat16, not {x_TD.dtype} and {embedding_ED.dtype}"
    if mask is not None:
        return "it takes tokens without a mask"
    if D % BLOCK != 0:
        return f"it takes D % {BLOCK} == 0, not {D}"
    if E not in ROUTED_EXPERTS or top_k > MOST_CHOICES:
        limits = f"{ROUTED_EXPERTS[0]} to {ROUTED_EXPERTS[-1]} experts and up to {MOST_CHOICES}"
        return f"it is for {limits} choices, not {E} and {top_k}"
    if reason := gluon_unsupported(x_TD.device):
        return reason
    if not fills_rounds(T):
        return f"{T} tokens would leave too many multiprocessors idle"
    return None


def fills_rounds(num_tokens: int) -> bool:
    """Return True if tiles of all experts keep the multiprocessors of the GPU busy."""
    tiles = cdiv(num_tokens, TILE)
    rounds = max(1, cdiv(tiles, multiprocessors()))
    least = ONE_ROUND if rounds == 1 else FULL_ROUNDS
    return tiles >= least * rounds * multiprocessors()


def hopper_unsupported(tokens: Tokens, embedding_ED: Tensor) -> str | None:
    """Return the reason why the kernels cannot or should not serve a call, or None."""
    T, D = tokens.x.shape
    if tokens.x.dtype != torch.bfloat16 or embedding_ED.dtype != torch.bfloat16:
        return f"it takes bfloat16, not {tokens.x.dtype} and {embedding_ED.dtype}"
    if tokens.is_sorted or tokens.has_mask:
        return "it takes tokens in their own order, without a mask"
    if T < FEWEST_TOKENS or D % BLOCK != 0:
        return f"it takes {FEWEST_TOKENS} tokens and more, and D % {BLOCK} == 0, not {T}, {D}"
    if embedding_ED.shape[0] % ALIGNMENT != 0:
        return f"its gradient takes E % {ALIGNMENT} == 0 experts, not {embedding_ED.shape[0]}"
    return gluon_unsupported(tokens.x.device)
