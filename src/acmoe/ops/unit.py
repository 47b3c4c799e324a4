"""Rows of unit length, for routers that compare directions.

X any leading dimensions, D features.
"""

import torch
from torch import Tensor, nn

from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import op, untraced
from acmoe.ops.grad_mode import is_batched

# Shorter rows are divided by this instead of their length, which bounds the gradient.
SHORTEST = 1e-6
MOST_FEATURES = 8192  # of a row, which a program holds in its registers


@op
def unit_rows(x_XD: Tensor) -> Tensor:
    """Return x / |x| for each row; a row of zeros stays zero and has gradient 0.

    A row shorter than 1e-6 is divided by 1e-6. The gradient of x / |x| grows as 1 / |x|: that of
    `torch.nn.functional.normalize` at zero is 1e12, which no 16-bit number can hold.
    """
    zero_X1 = torch.linalg.vector_norm(x_XD.detach(), dim=-1, keepdim=True) == 0
    # Zeros become ones and zeros again, so that no derivative, of any order, is taken at zero.
    safe_XD = x_XD.masked_fill(zero_X1, 1.0)
    unit_XD = nn.functional.normalize(safe_XD, dim=-1, eps=SHORTEST)
    return unit_XD.masked_fill(zero_X1, 0.0)


def _unsupported(x_XD: Tensor) -> str | None:
    if not untraced(x_XD):
        return "something traces the call"
    if x_XD.dtype != torch.float32:
        return f"its kernel takes float32 rows, not {x_XD.dtype}"
    if x_XD.numel() == 0:
        return "there are no rows"
    if x_XD.shape[-1] > MOST_FEATURES:
        return f"its kernel takes up to {MOST_FEATURES} features, not {x_XD.shape[-1]}"
    return triton_unsupported(x_XD)


@unit_rows.register("triton", unsupported=_unsupported, by_triton=True)
def _unit_by_triton(x_XD: Tensor) -> Tensor:
    found: Tensor = _UnitRows.apply(x_XD)  # type: ignore[no-untyped-call]
    return found


class _UnitRows(torch.autograd.Function):
    """Rows of unit length and their gradient, one launch each instead of some twenty of torch."""

    @staticmethod
    def forward(ctx, x_XD):  # type: ignore[no-untyped-def]
        from acmoe.ops.norm.triton.unit import launch_unit_rows

        ctx.save_for_backward(x_XD)
        return launch_unit_rows(x_XD.contiguous(), None, SHORTEST)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        from acmoe.ops.norm.triton.unit import launch_unit_rows

        (x_XD,) = ctx.saved_tensors
        # create_graph=True: the gradient is differentiated in turn. is_grads_batched=True: a kernel
        # cannot read the gradients of a batch.
        again = torch.is_grad_enabled()
        if again or is_batched(grad) or not untraced(grad):
            with torch.enable_grad():
                x_XD = x_XD if again else x_XD.detach().requires_grad_()
                unit_XD = unit_rows.definition(x_XD)
            return torch.autograd.grad(unit_XD, x_XD, grad, create_graph=again)[0]
        return launch_unit_rows(x_XD.contiguous(), grad.contiguous(), SHORTEST)
