"""Numbers on their way from the host to the device, without a wait for either."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """What the host drew, on the device; the host goes on while it is copied.

    Only pinned memory is copied so. Its allocator gives the memory to nobody else before the copy
    is done.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@lru_cache(maxsize=32)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(N,) float32, copied once: such a copy waits. Not to be changed in place."""
    return torch.tensor(values, dtype=torch.float32, device=device)
