"""Autocast: which GEMMs must stay float32, and the dtype of the others."""

import contextlib
from typing import Any

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which GEMMs of float32 tensors on x's device stay float32."""
    if x.is_meta:  # the meta device has no autocast
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives a GEMM of x; None where it leaves x alone."""
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
