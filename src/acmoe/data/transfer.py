"""Asynchronous copies from the host to the device."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Copy values to the device; for CUDA without waiting for the copy.

    Only pinned memory can be copied asynchronously. The pinned-memory allocator does not reuse a
    buffer before its copy is done.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@lru_cache(maxsize=32)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return values as (N,) float32 on the device. Do not modify it in place: it is cached.

    The first call waits for its copy to the device; later calls do not copy.
    """
    return torch.tensor(values, dtype=torch.float32, device=device)
