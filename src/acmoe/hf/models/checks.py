"""Checks of tensor values that do not break a compiled graph."""

import torch
from torch import Tensor

from acmoe.errors import check


def check_all(holds: Tensor, message: str, *, wait: bool = False) -> None:
    """Raise `message` unless every entry of a bool tensor is True.

    Eager calls on a CPU raise a UserError. On a GPU, and in compiled code, the check is an
    assertion of torch, which raises a RuntimeError when the device, or the compiled code, reaches
    it. Tensors on the meta device have no values to check.

    wait: let the host wait for the GPU, so that eager calls raise a UserError there too.
    """
    if holds.is_meta:
        return
    asynchronous = holds.device.type != "cpu" and not wait
    if torch.compiler.is_compiling() or asynchronous:
        torch._assert_async(holds.all(), message)
        return
    check(bool(holds.all()), message)
