"""Ask what autograd does with tensors: whether it records them, or batches their gradients."""

import torch
from torch import Tensor
from torch.compiler import is_compiling


def records_gradient(*tensors: Tensor | None) -> bool:
    """Return True if a function of these tensors would get a gradient function from autograd."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110, `any` takes more of the host's time
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def is_batched(grad: Tensor) -> bool:
    """Return True for a gradient of `is_grads_batched=True`.

    It has no memory of its own: kernels cannot read it, and products with `out=` have no batching
    rule. torch calls a custom op for each gradient of the batch. Compiled autograd has no such
    gradients, and cannot trace the question.
    """
    return not is_compiling() and torch._C._functorch.is_legacy_batchedtensor(grad)
