"""Autocast and the mathematics: what must not be lowered to 16 bits, and what may."""

import contextlib
from typing import Any

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, a matrix product of float32 tensors on x's device stays float32."""
    if x.is_meta:  # no such thing as autocast there
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast lowers a matrix product of x to; None where it leaves x alone."""
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
