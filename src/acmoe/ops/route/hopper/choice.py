"""Decide whether the router's Hopper kernels serve a call."""

import torch
from torch import Tensor

from acmoe.ops.device.hopper import gluon_unsupported
from acmoe.ops.route.triton.tokens import Tokens

# With fewer tokens there is no tile of 128 for each multiprocessor. Affinities of scaled tokens and
# 512 experts on an H200, by Triton and here: 16,384 tokens take 195 and 118 us. 4,096 tokens took
# 56 and 71 us, when this kernel was slower (145 us for 16,384).
FEWEST_TOKENS = 8192
BLOCK, ALIGNMENT = 64, 8  # features of a block; TMA needs rows of a multiple of 16 bytes


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
