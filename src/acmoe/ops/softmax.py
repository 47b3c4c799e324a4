"""Softmax over the last dimension, in the layout that is fastest on this CPU.

torch computes it row by row. A row that is narrower than a vector register leaves the vectorised
code: 8 columns take longer than 16. The softmax over the first dimension of the transposed tensor
is vectorised over rows, and pays for the copies (one core of a Xeon with AVX-512, torch 2.13,
1,024 rows of float32, microseconds):

    columns      softmax(-1)    transposed    their backward
    2                     65            17          19    14
    8                    176            44          67    32
    16                    38            67          12    45

T rows, E columns.
"""

import functools

import torch
from torch import Tensor

FEW_ROWS = 256  # rows below which the copies take as long as they save
_REGISTER_BYTES = {"AVX512": 64, "AVX2": 32}  # other CPUs have not been timed


@functools.cache
def _register_bytes() -> int:
    return _REGISTER_BYTES.get(torch.backends.cpu.get_cpu_capability(), 0)


def row_softmax(x_TE: Tensor) -> Tensor:
    """Return softmax(x, -1), up to rounding; its memory may be transposed."""
    if _narrow(x_TE):
        return x_TE.T.contiguous().softmax(0).T
    return x_TE.softmax(-1)


def _narrow(x_TE: Tensor) -> bool:
    """Return True if the transposed form is faster. A compiled graph has code of its own."""
    if x_TE.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    rows, columns = x_TE.shape
    return rows >= FEW_ROWS and columns * x_TE.element_size() < _register_bytes()
