"""Refuse reentrant checkpointing where it would drop the gradient of the auxiliary loss.

`checkpoint(block, x, state, use_reentrant=True)` is one autograd function, which sees the tensors
among its outputs and not those inside a tuple. A block that returns (y, state) gets no gradient for
`state.aux_loss` then, and torch says nothing. It is right if the block returns tensors alone,
(y, *state). The choice shows when the backward repeats the forward: there the autograd function has
one gradient per output tensor, and None for an output that is no tensor. If several tensors left it
and none is a scalar, the loss may be inside of one, and the backward shows whether it is used.
"""

import sys
from types import FrameType

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import CheckpointFunction

from acmoe.errors import UserError
from acmoe.ops.statistics.pending import replaying

_REPEATS = CheckpointFunction.backward.__code__
_RUNS = _engine_run_backward.__code__
_DROPPED = (
    "use_reentrant=True drops the gradient of state.aux_loss, because only tensors leave "
    "such a checkpoint with a gradient and the state is a tuple of them; use "
    "checkpoint(..., use_reentrant=False), or return (y, *state) from the block"
)


def check_reentrant(aux_loss: Tensor) -> None:
    """Raise a UserError if a reentrant checkpoint repeats this forward without using its aux_loss.

    The loss is taken as used if a scalar left the checkpoint. If other tensors alone left it, at
    least two, the error comes at the end of the backward.
    """
    if torch.compiler.is_compiling() or not replaying() or not aux_loss.requires_grad:
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in (_REPEATS, _RUNS):
        frame = frame.f_back
    # A backward that runs inside the checkpoint's own has come to a checkpoint of another kind,
    # which repeats this forward for saved tensors and discards its loss.
    if frame is None or frame.f_code is _RUNS:
        return
    gradients = frame.f_locals.get("args", ())
    outputs = [one for one in gradients if isinstance(one, Tensor)]
    beside_others = len(outputs) == 1 or len(outputs) < len(gradients)
    if not outputs or any(one.dim() == 0 for one in outputs):
        return
    if beside_others:
        raise UserError(_DROPPED)
    _check_used(aux_loss)


def _check_used(aux_loss: Tensor) -> None:
    """Raise a UserError at the end of the backward under way unless aux_loss has got a gradient."""
    used: list[bool] = []
    aux_loss.register_hook(lambda gradient: used.append(True))  # type: ignore[no-untyped-call]

    def check_at_end() -> None:
        if not used:
            raise UserError(_DROPPED)

    Variable._execution_engine.queue_callback(check_at_end)
