"""Ask whether autograd records what is computed from tensors."""

import torch
from torch import Tensor


def records_gradient(*tensors: Tensor | None) -> bool:
    """Return True if a function of these tensors would get a gradient function from autograd."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110, `any` takes more of the host's time
        if tensor is not None and tensor.requires_grad:
            return True
    return False
