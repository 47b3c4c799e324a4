"""Launch the forward and the backward of the fused experts.

Small calls repeat the launches of the first of their kind. Triton is imported late: a CPU needs
none.
"""

from typing import Any

import torch
from torch import Tensor

from acmoe.config.environment import gluon_requested
from acmoe.ops.environment import is_set
from acmoe.ops.experts.settings import lookup, tables
from acmoe.ops.experts.triton.sizes import GradientOptions, Operands
from acmoe.ops.taped import taped

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# Operations of a forward's GEMMs up to which its launches are repeated. At 400 TFLOP/s 1e12 of them
# take 2.5 ms, and the backward 5 more: then the GPU takes longer than the host in any case.
MOST_OPERATIONS = 1e12


def launch_forward(
    operands: Operands, act: str, dropout: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return the outputs (T, D), and h (N, W) for backward if `keep`, else h without rows."""
    from acmoe.ops.experts.triton.launched import launched_forward

    return launched_forward(operands, act, dropout, keep=keep)


def launch_gradients(
    grad: Tensor, operands: Operands, h: Tensor, dh: Tensor, options: GradientOptions
) -> Gradients:
    """Return the gradients of x, up, down, up_bias, down_bias and gate.

    grad is that of the outputs. dh is the buffer for the gradient of h; it may be h itself.
    """
    from acmoe.ops.experts.triton.launched import launched_gradients

    return launched_gradients(grad, operands, h, dh, options)


def repeated(operands: Operands, act: str, dropout: float, keep: bool) -> tuple[Tensor, ...]:
    """Return the results of `launch_forward`; without `keep` h may be left out.

    No gradient may be recorded, and nothing may observe the launches (`dispatch.eager`).
    """
    chosen = _choices(operands)
    if chosen is None:
        return launch_forward(operands, act, dropout, keep)
    given = (*operands[:-1], operands.seed if dropout > 0 else None)
    return taped(_outputs, given, (act, dropout, keep, chosen))


def repeated_gradients(
    grad: Tensor, operands: Operands, h: Tensor, options: GradientOptions
) -> tuple[Tensor, ...]:
    """Return the results of `launch_gradients`, which overwrites h, under the same conditions."""
    chosen = _choices(operands)
    if chosen is None:
        return launch_gradients(grad, operands, h, h, options)
    given = (grad, *operands[:-1], h, operands.seed if options.dropout > 0 else None)
    return taped(_gradients, given, (options, chosen))


def _choices(operands: Operands) -> tuple[Any, ...] | None:
    """Return what block sizes depend on beside the tensors; None: launch without a tape."""
    x, up, down, gate = operands.x, operands.up, operands.down, operands.gate
    _, dim, hidden = down.shape
    if 2 * gate.numel() * dim * (up.shape[1] + hidden) > MOST_OPERATIONS:
        return None
    if lookup.OVERRIDE or lookup.PIPELINE_OVERRIDE or lookup.COPY_OVERRIDE:
        return None
    precision = torch.backends.cuda.matmul.fp32_precision if x.dtype == torch.float32 else None
    gluon = gluon_requested() if is_set("ACMOE_GLUON") else None
    return gluon, _table_key(), len(lookup.MEASURED), precision


_last_table: tuple[Any, object] = (None, None)  # a table of tuned kernels, and its key


def _table_key() -> object:
    """Return an object that stands for the user's table of tuned kernels, which has no hash.

    The same table has the same object, so that Python compares the two by identity.
    """
    global _last_table
    table = tables.user_table()
    last = _last_table
    if last[0] is not table:
        last = _last_table = (table, object())
    return last[1]


def _outputs(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, seed, act, dropout, keep, _ = inputs
    found = launch_forward(_operands(tensors, seed), act, dropout, keep)
    return found if keep else found[:1]


def _gradients(*inputs: Any) -> tuple[Tensor, ...]:
    grad, *tensors, h, seed, options, _ = inputs
    return launch_gradients(grad, _operands(tensors, seed), h, h, options)


def _operands(tensors: list[Any], seed: Tensor | None) -> Operands:
    """Return the operands. Without dropout the kernels do not read the seed: any tensor serves."""
    return Operands(*[*tensors, tensors[-1] if seed is None else seed])
