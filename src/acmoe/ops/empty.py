"""Tensors without elements, which carry a shape alone."""

import torch
from torch import Tensor

from acmoe.ops.dispatch import eager

_made: dict[tuple[object, ...], Tensor] = {}


def no_elements(
    shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, *, known: Tensor | None = None
) -> Tensor:
    """Return an empty tensor of this shape, which has a 0, on the device of `like`.

    Nothing can be written to it, so that eager calls share one: making it takes 3 us and more.
    known: an empty tensor of this dtype, which is returned if it has the shape and the device.
    """
    if known is not None and known.shape == shape and known.device == like.device:
        return known
    if not eager(like):
        return _new(shape, dtype, like.device)
    return shared_empty(shape, dtype, like.device)


def shared_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the tensor of `no_elements`, in a call that is `eager`."""
    key = (shape, dtype, device, torch.is_inference_mode_enabled())
    found = _made.get(key)
    if found is None:
        found = _made[key] = _new(shape, dtype, device)
    return found


def _new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    assert 0 in shape, shape
    return torch.empty(shape, dtype=dtype, device=device)
