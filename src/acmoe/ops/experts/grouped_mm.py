"""PyTorch's own grouped GEMM, which reads the offsets of the experts' rows on the device.

N rows, I features in, O features out, E experts.
"""

import torch
from torch import Tensor

from acmoe.ops.device_support import on_nvidia
from acmoe.ops.flops import tell_counters


def grouped_mm_unsupported(device: torch.device, dtype: torch.dtype, *widths: int) -> str | None:
    """Return the reason why PyTorch's grouped GEMM cannot take rows of these widths, or None."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return "this torch has no grouped_mm; 2.10 is the first"
    if device.type != "cuda":
        return f"it serves CUDA devices, not {device.type}"
    if not on_nvidia(device):
        return "it has never run on an AMD GPU"
    if dtype != torch.bfloat16:
        return f"it takes bfloat16 on this device, not {dtype}"
    if any(width * dtype.itemsize % 16 for width in widths):
        return f"it needs rows of a multiple of 16 bytes, not widths {widths}"
    return None


def rows_by_torch(
    a_NI: Tensor, weight: Tensor, offsets_E: Tensor, *, across: bool = False
) -> Tensor:
    """Return (N, O) = a @ weight[e]^T for weight (E, O, I), across: a @ weight[e] for (E, I, O).

    Rows that belong to no expert are not written. There is no gradient.
    """
    right = weight if across else weight.mT
    return torch.nn.functional.grouped_mm(a_NI, right, offs=offsets_E.to(torch.int32))


def weights_by_torch(p_NO: Tensor, q_NI: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (E, O, I): p^T q summed over each expert's rows. There is no gradient."""
    return torch.nn.functional.grouped_mm(p_NO.mT, q_NI, offs=offsets_E.to(torch.int32))


def grouped_mm(x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute `grouped_linear` (grouped.py) with PyTorch's grouped GEMM.

    PyTorch's kernel does not write the rows that belong to no expert, neither in the output nor in
    the gradient of x. The two masks below set them to zero; the first acts in backward.
    """
    tell_counters()
    unrouted_N1 = (torch.arange(x_NI.shape[0], device=x_NI.device) >= offsets_E[-1])[:, None]
    x_NI = x_NI.masked_fill(unrouted_N1, 0.0)
    y_NO = torch.nn.functional.grouped_mm(x_NI, weight_EOI.mT, offs=offsets_E.to(torch.int32))
    return y_NO.masked_fill(unrouted_N1, 0.0)
