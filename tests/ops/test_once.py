"""A backward pass that takes one gradient at a time says so, and hides no other error."""

from typing import Any

import pytest
import torch
from torch import Tensor

from acmoe.errors import UserError
from acmoe.ops.once import differentiable_once

KINDS = {"no rule": RuntimeError, "out of memory": torch.OutOfMemoryError}


class _Failing(torch.autograd.Function):
    """The identity, whose backward raises the error of the given kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raise KINDS[ctx.kind](ctx.kind)


@pytest.mark.parametrize(
    ("kind", "batched", "error", "said"),
    [
        ("no rule", True, UserError, "one gradient at a time"),
        ("no rule", False, RuntimeError, "^no rule$"),
        ("out of memory", True, torch.OutOfMemoryError, "^out of memory$"),
    ],
)
def test_only_a_missing_rule_for_batches_becomes_a_user_error(
    kind: str, batched: bool, error: type[Exception], said: str
) -> None:
    x_D = torch.ones(3, requires_grad=True)
    y_D = _Failing.apply(x_D, kind)  # type: ignore[no-untyped-call]
    grad = torch.ones(2, 3) if batched else torch.ones(3)
    with pytest.raises(error, match=said):
        torch.autograd.grad(y_D, x_D, grad, is_grads_batched=batched)
