"""Convert and check what the figures are given: tensors, arrays or sequences of numbers.

N tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from acmoe.errors import check

Numbers: TypeAlias = "torch.Tensor | NDArray[Any] | Sequence[Any]"


def as_array(values: Numbers, name: str, ndim: int) -> NDArray[Any]:
    """Return `values` as a NumPy array with `ndim` axes and finite entries, or raise."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu")
        values = values.float() if values.dtype == torch.bfloat16 else values  # NumPy has no bf16
    array = np.asarray(values)
    check(array.ndim == ndim, f"{name} has shape {array.shape}; it needs {ndim} axes")
    check(array.size > 0, f"{name} has shape {array.shape}; there is nothing to draw")
    check(bool(np.isfinite(array).all()), f"{name} holds NaN or infinity; draw finite values")
    return array


def as_experts(values: Numbers, name: str, ndim: int, num_experts: int) -> NDArray[np.int64]:
    """Return expert numbers as an array of integers in 0 ... num_experts - 1, or raise."""
    array = as_array(values, name, ndim)
    check(array.dtype.kind in "iu", f"{name} has dtype {array.dtype}; experts are whole numbers")
    low, high = int(array.min()), int(array.max())
    check(
        low >= 0 and high < num_experts,
        f"{name} reaches from {low} to {high}; with num_experts={num_experts} they are "
        f"0 to {num_experts - 1}",
    )
    return array.astype(np.int64)


def check_captions(captions: Sequence[str] | None, count: int) -> None:
    check(
        captions is None or len(captions) == count,
        f"{len(captions or ())} captions for {count} images; give one for each",
    )


def check_count(count: int, most: int, what: str) -> None:
    check(0 < count <= most, f"{count} {what}; one figure holds 1 to {most}")
