"""Copy the rows of strided views in 16-byte words."""

import torch
from torch import Tensor

from acmoe.ops.precision import wide_dtype

_WORD = torch.complex128  # 16 bytes, the largest load of a thread


def copy_rows(out: Tensor, new: Tensor) -> None:
    """Copy `new` into `out` in 16-byte words; PyTorch copies strided views element by element."""
    strided = not (out.is_contiguous() and new.is_contiguous())
    strided = strided and wide_dtype(out.device) == torch.float64  # a word is two of them
    if strided and out.dtype == new.dtype and _in_words(new) and _in_words(out):
        out, new = out.view(_WORD), new.view(_WORD)
    out.copy_(new, non_blocking=True)


def _in_words(tensor: Tensor) -> bool:
    """Return True if every row begins and ends at a multiple of 16 bytes."""
    numbers = _WORD.itemsize // tensor.element_size()
    steps = (tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and not any(step % numbers for step in steps)
