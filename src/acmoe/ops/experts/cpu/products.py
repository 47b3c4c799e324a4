"""One expert's product x @ weight^T, in the operand layout that is fastest on this CPU.

On ARM torch gives this float32 product to oneDNN, because both operands have the summed dimension
contiguous, and other layouts to BLAS. oneDNN takes 0.1 ms before it begins, and is faster with the
operands exchanged, weight @ x^T. Copying the result costs less (two Neoverse-N1 cores, torch 2.13,
milliseconds):

    rows x inputs x outputs     x @ weight^T    by BLAS, copied    weight @ x^T, copied
    64 x 64 x 64                       0.104              0.058                   0.125
    64 x 352 x 352                     0.379              0.306                   0.398
    64 x 2048 x 2048                   9.04               9.04                    8.23
    256 x 2048 x 2048                 31.4               31.1                    33.0

torch's settings are read and never changed. On other CPUs, and on GPUs, nothing is copied.

A single row is a product of a matrix and a vector, on any CPU. For two to five rows and a large
weight BLAS on ARM takes longer than such products one after another:

    inputs x outputs        1 row    2 rows, as vectors    4 rows, as vectors
    352 x 352               0.045      0.096    0.079        0.106    0.136
    1024 x 1024             0.143      0.503    0.258        0.529    0.465
    2048 x 2048             0.555      2.955    1.016        3.070    1.884

r rows of one expert, I features in, O features out, E experts.
"""

import functools
import platform

import torch
from torch import Tensor

FEW_ROWS, MANY_ROWS = 12, 96  # below the first torch takes BLAS in any layout
LARGE = 2**23  # multiplications of a product from which oneDNN is as fast as BLAS
TINY = 2**13  # elements of a weight up to which it is copied rather than the result
# Rows up to which a weight of WIDE elements and more is multiplied by one row after another.
FEWEST_ROWS, WIDE = 5, 2**20


@functools.cache
def _arm_with_onednn() -> bool:
    arm = platform.machine() in ("aarch64", "arm64")
    return arm and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def chooses_onednn(x: Tensor) -> bool:
    """Return True if torch chooses between oneDNN and BLAS by the layout of products of x."""
    on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    return on_cpu and _arm_with_onednn() and bool(torch.backends.mkldnn.enabled)


def any_layout(x: Tensor, weight_XOI: Tensor) -> bool:
    """Return True if torch multiplies x @ weight^T by BLAS, however the operands are laid out."""
    return weight_XOI.stride(-1) != 1 or not chooses_onednn(x)


def laid_out(weight_EOI: Tensor, num_rows: int) -> Tensor:
    """Return the weights for products with `num_rows` rows in all, tiny ones laid out for BLAS.

    The result equals `weight_EOI`; only its strides may differ.
    """
    E, O, I = weight_EOI.shape  # noqa: E741, the letters of the shapes
    tiny = num_rows >= FEW_ROWS * E and O * I <= TINY and weight_EOI.stride(-1) == 1
    return weight_EOI.mT.contiguous().mT if tiny and chooses_onednn(weight_EOI) else weight_EOI


def as_vectors(x: Tensor, weight: Tensor, rows: int) -> bool:
    """Return True if `rows` rows like x times a weight (..., O, I) are products with vectors."""
    if rows > FEWEST_ROWS or x.device.type != "cpu":
        return False
    wide = weight.shape[-2] * weight.shape[-1] >= WIDE
    exact = x.dtype in (torch.float32, torch.float64)
    return exact and (rows == 1 or (wide and chooses_onednn(x)))


def rows_as_vectors(x: Tensor, weight: Tensor) -> int:
    """Return up to how many rows of an expert are multiplied as vectors: 0, 1 or FEWEST_ROWS."""
    if not as_vectors(x, weight, 1):
        return 0
    return FEWEST_ROWS if as_vectors(x, weight, 2) else 1


def rows_product(x_rI: Tensor, weight_OI: Tensor, *, out: Tensor) -> None:
    """Write x @ weight^T to `out`, (r, O)."""
    out_rO, rows = out, x_rI.shape[0]
    if as_vectors(x_rI, weight_OI, rows):
        for x_I, out_O in zip(x_rI.unbind(), out_rO.unbind(), strict=True):
            torch.mv(weight_OI, x_I, out=out_O)
        return
    large = rows * weight_OI.numel() >= LARGE
    if any_layout(x_rI, weight_OI) or rows < FEW_ROWS or (large and rows >= MANY_ROWS):
        torch.mm(x_rI, weight_OI.T, out=out_rO)
        return
    swapped_Or = out_rO.new_empty(weight_OI.shape[0], rows)
    if large:
        torch.mm(weight_OI, x_rI.T, out=swapped_Or)
    else:
        torch.mm(x_rI, weight_OI.T, out=swapped_Or.T)
    out_rO.copy_(swapped_Or.T)
