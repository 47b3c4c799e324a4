"""Precision: which GEMMs autocast leaves in float32, and where float64 is to be had."""

import contextlib
from typing import Any

import torch
from torch import Tensor

WITHOUT_FLOAT64 = frozenset({"mps"})  # types of device whose tensors cannot be float64


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device without float64 (Apple's MPS, some Intel GPUs)."""
    lacks = device.type in WITHOUT_FLOAT64
    if device.type == "xpu":
        lacks = not torch.xpu.get_device_properties(device).has_fp64
    return torch.float32 if lacks else torch.float64


_UNCHANGED = contextlib.nullcontext()


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which GEMMs of float32 tensors on x's device stay float32."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # meta has no autocast
        return _UNCHANGED
    return torch.autocast(x.device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives a GEMM of x; None where it leaves x alone."""
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
