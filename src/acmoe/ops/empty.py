"""Tensors without elements, which carry a shape alone."""

import torch
from torch import Tensor

from acmoe.ops.dispatch import eager, transforming

_made: dict[tuple[object, ...], Tensor] = {}


def no_elements(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return an empty tensor of this shape, which has a 0, on the device of `like`.

    Nothing can be written to it, so that eager calls share one: making it takes 3 us and more.
    """
    assert 0 in shape, shape
    device = like.device
    if transforming() or not eager(like):
        return torch.empty(shape, dtype=dtype, device=device)
    key = (shape, dtype, device, torch.is_inference_mode_enabled())
    found = _made.get(key)
    if found is None:
        found = _made[key] = torch.empty(shape, dtype=dtype, device=device)
    return found
