"""Refuse reentrant checkpointing where it would drop the gradient of the auxiliary loss.

`checkpoint(block, x, state, use_reentrant=True)` is one autograd function, which sees the tensors
among its outputs and not those inside a tuple. A block that returns (y, state) gets no gradient for
`state.aux_loss` then, and torch says nothing. It is right if the block returns tensors alone,
(y, *state). The choice shows when the backward repeats the forward: there the autograd function has
one gradient per output tensor, and None for an output that is no tensor.
"""

import sys
from types import FrameType

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from acmoe.errors import UserError
from acmoe.ops.statistics.pending import replaying

_REPEATS = CheckpointFunction.backward.__code__


def check_reentrant(aux_loss: Tensor) -> None:
    """Raise a UserError if a reentrant checkpoint repeats this forward without using its aux_loss.

    The loss can be used if a scalar left the checkpoint, or several tensors and nothing else.
    """
    if torch.compiler.is_compiling() or not replaying() or not aux_loss.requires_grad:
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _REPEATS:
        frame = frame.f_back
    if frame is None:
        return
    gradients = frame.f_locals.get("args", ())
    outputs = [one for one in gradients if isinstance(one, Tensor)]
    beside_others = len(outputs) == 1 or len(outputs) < len(gradients)
    if outputs and beside_others and all(one.dim() > 0 for one in outputs):
        raise UserError(
            "use_reentrant=True drops the gradient of state.aux_loss, because only tensors leave "
            "such a checkpoint with a gradient and the state is a tuple of them; use "
            "checkpoint(..., use_reentrant=False), or return (y, *state) from the block"
        )
