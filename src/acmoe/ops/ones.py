"""Ones in place of a scale that nobody reads."""

import torch
from torch import Tensor

from acmoe.ops.dispatch import eager


def ones_like(like: Tensor, *, holds_ones: bool) -> Tensor:
    """Return a tensor of ones, shaped as `like`, without a gradient.

    holds_ones: `like` holds ones already. An eager call then returns it, which saves a launch.
    """
    if not holds_ones or not eager(like) or like.requires_grad or like.is_inference():
        return torch.ones_like(like)
    return like
