"""Forward and backward of the fused experts: small calls repeat the launches of the first of their
kind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acmoe.config.environment import gluon_requested
from acmoe.ops.device import tuning
from acmoe.ops.environment import is_set
from acmoe.ops.taped import taped

Run = Callable[..., tuple[Tensor, ...]]

# Operations of a forward's GEMMs up to which its launches are repeated. At 400 TFLOP/s 1e12 of them
# take 2.5 ms, and the backward 5 more: then the GPU takes longer than the host in any case.
MOST_OPERATIONS = 1e12


def repeated(forward: Run, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the outputs (T, D) of `forward`, which is `_forward` of autograd.py, and h if kept.

    No gradient may be recorded, and nobody may watch the launches (`dispatch.eager`).
    """
    *tensors, seed, act, dropout, keep, _up, _down = arguments
    chosen = _choices(*tensors[:6])
    if chosen is None:
        return forward(*arguments)
    given = (*tensors, seed if dropout > 0 else None)
    return taped(_outputs, given, (forward, act, dropout, keep, chosen))


def repeated_gradients(gradients: Run, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the results of `gradients`, which is `_gradients` of autograd.py, under the same
    conditions; dh must be h."""
    grad, *tensors, seed, h, _dh, act, dropout, dtype, needs_up, needs_down = arguments
    chosen = _choices(*tensors[:6])
    if chosen is None:
        return gradients(*arguments)
    given = (grad, *tensors, h, seed if dropout > 0 else None)
    settings = (gradients, act, dropout, dtype, needs_up, needs_down, chosen)
    return taped(_gradients, given, settings)


def _choices(
    x: Tensor, up: Tensor, down: Tensor, _up_bias: Any, _down_bias: Any, gate: Tensor
) -> tuple[Any, ...] | None:
    """Return what block sizes depend on beside the tensors; None: launch without a tape."""
    _, dim, hidden = down.shape
    if 2 * gate.numel() * dim * (up.shape[1] + hidden) > MOST_OPERATIONS:
        return None
    if tuning.OVERRIDE or tuning.PIPELINE_OVERRIDE or tuning.COPY_OVERRIDE:
        return None
    precision = torch.backends.cuda.matmul.fp32_precision if x.dtype == torch.float32 else None
    gluon = gluon_requested() if is_set("ACMOE_GLUON") else None
    return gluon, _table_key(), len(tuning.MEASURED), precision


_last_table: tuple[Any, object] = (None, None)  # a table of tuned kernels, and its key


def _table_key() -> object:
    """Return an object that stands for the user's table of tuned kernels, which has no hash.

    It is the same as long as the table is, so that Python compares it by identity.
    """
    global _last_table
    table = tuning.user_table()
    last = _last_table
    if last[0] is not table:
        last = _last_table = (table, object())
    return last[1]


# Without dropout the kernels do not read the seed, for which any tensor serves.
def _outputs(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, seed, forward, act, dropout, keep, _ = inputs
    _, up, down, *_, expert = tensors
    options = (act, dropout, keep, up, down)
    found: tuple[Tensor, ...] = forward(*tensors, expert if seed is None else seed, *options)
    return found if keep else found[:1]


def _gradients(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, h, seed, gradients, act, dropout, dtype, needs_up, needs_down, _ = inputs
    options = (act, dropout, dtype, needs_up, needs_down)
    expert = tensors[-1]
    found: tuple[Tensor, ...]
    found = gradients(*tensors, expert if seed is None else seed, h, h, *options)
    return found
