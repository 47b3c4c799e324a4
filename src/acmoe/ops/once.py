"""Autograd functions that `torch.func` never sees, and that have no second derivative."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from acmoe.errors import UserError


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return `function.apply(*args)`, outside of `torch.func` transforms.

    The `apply` of torch looks at every argument for transforms, which takes 5 us; ops run their
    definition under one (`dispatch.transforming`).
    """
    if is_compiling():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def as_saved(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Return saved tensors as kernels read them, from the first element to the last.

    The hooks of `torch.autograd.graph.saved_tensors_hooks`, which compress or offload saved
    tensors, may bring them back with other strides.
    """
    return [one if one is None or one.is_contiguous() else one.contiguous() for one in tensors]


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a second derivative through `backward`, of an `autograd.Function`, raise.

    `torch.autograd.function.once_differentiable` raises only if the incoming gradient requires a
    gradient itself. The gradient of a loss is the constant 1, so a gradient penalty would silently
    lose this function's second derivative.

    In a batched backward, a kernel finds a tensor without memory; the error then says what to do.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        records = torch.is_grad_enabled()  # with create_graph alone; `no_grad` takes 3 us
        try:
            if records:
                with torch.no_grad():
                    found = backward(ctx, *grads)
            else:
                found = backward(ctx, *grads)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not any(map(_batched, grads)):
                raise
            raise UserError(
                "this op takes one gradient at a time, not a batch of them (is_grads_batched, "
                "vmap); run the forward on the plain path, acmoe.ops.dispatch.use_backend('torch')"
            ) from error
        if not records:  # nobody can differentiate further
            return found
        found = found if isinstance(found, tuple) else (found,)
        message = (
            "acmoe: this op has no second derivative; take it inside torch.func, or on the plain "
            "path, acmoe.ops.dispatch.use_backend('torch')"
        )
        refuse = torch._C._functions.DelayedError(message.encode(), len(found))
        leaves: list[Any] = [
            None if one is None else one.detach().requires_grad_() for one in found
        ]
        return refuse(*leaves)

    return wrapper


def _batched(grad: Any) -> bool:
    """Return True for a gradient of `is_grads_batched=True`, or inside `torch.func.vmap`."""
    kinds = (torch._C._functorch.is_legacy_batchedtensor, torch._C._functorch.is_batchedtensor)
    return isinstance(grad, torch.Tensor) and any(kind(grad) for kind in kinds)
