"""Copies of rows."""

import torch
from torch import Tensor

_WORD = torch.complex128  # 16 bytes, the most a thread moves at once


def copy_rows(kept: Tensor, new: Tensor) -> None:
    """Fill `kept`. Views of rows go in words: torch copies what has gaps number by number."""
    gaps = not (kept.is_contiguous() and new.is_contiguous())
    if gaps and kept.dtype == new.dtype and _in_words(new) and _in_words(kept):
        kept, new = kept.view(_WORD), new.view(_WORD)
    kept.copy_(new, non_blocking=True)


def _in_words(tensor: Tensor) -> bool:
    """Whether every row begins and ends with a word."""
    numbers = _WORD.itemsize // tensor.element_size()
    steps = (tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and not any(step % numbers for step in steps)
