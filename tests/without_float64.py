"""A CPU that plays a device without float64, as Apple's MPS is: every such tensor is an error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from acmoe.ops import precision

WIDE = (torch.float64, torch.complex128)
# Files that compute in float64 on the host, on tensors they have copied there with `.cpu()`.
ON_HOST = ("acmoe/evaluate/measures.py", "acmoe/evaluate/routing.py")


class RefuseFloat64(TorchDispatchMode):
    """Raises a TypeError where an operator returns a float64 tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        wide = [leaf for leaf in tree_leaves(found) if getattr(leaf, "dtype", None) in WIDE]
        if wide and not _on_host():
            raise TypeError(f"{func} returns {wide[0].dtype}, which the device does not have")
        return found


def _on_host() -> bool:
    """Return True if a file of ON_HOST is among the callers."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(ON_HOST):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def without_float64(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the library take the CPU for a device without float64, and refuse such tensors."""
    with patch.context() as inside:
        inside.setattr(precision, "WITHOUT_FLOAT64", frozenset({"cpu"}))
        with RefuseFloat64():
            yield
