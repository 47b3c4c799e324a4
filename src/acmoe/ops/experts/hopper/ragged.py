"""TMA descriptors of rows sorted by expert, whose loads end at the last row of an expert.

A plain descriptor of rows (N, I) reads the next expert's rows past the end of an expert's, or rows
that were never written. The descriptors here have two more dimensions in front, with strides of
2^34 - I and I elements. Row r of the rows from `begin` to `end` is at the coordinates
    (2^30, end, 2^30 - (end - begin) + r)
whose address is that of row begin + r, since addresses wrap around at 2^64 bytes. The last of these
coordinates is below the size of its dimension, 2^30, exactly if r < end - begin: TMA fills all
other rows with zeros and does not read them. (triton.tools.ragged_tma does the same in Triton.)
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from acmoe.ops.device.gluon_names import load_tile
from acmoe.ops.device.launcher import tma_aligned
from acmoe.ops.device.tma import swizzled

_ROWS = gl.constexpr(1 << 30)  # size of the dimension whose coordinate ends with an expert's rows
_SIZE = 0x7FFF0000  # size of a dimension that contains every coordinate in use


def ragged_desc(rows: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a descriptor of rows (N, I) for `load_expert_rows`."""
    rows = tma_aligned(rows)
    stride = rows.stride(0)
    return TensorDescriptor(
        rows,
        [_SIZE, _SIZE, _ROWS.value, rows.shape[1]],
        [(1 << 34) - stride, stride, stride, 1],
        [1, 1, *block],
        swizzled(1, 1, *block),
    )


@gluon.jit
def load_expert_rows(desc, row, end, column, barrier, buf, pred=True):
    """Load a block of rows from `row` on; rows from `end` on are zeros."""
    view = buf.reshape([1, 1, buf.shape[0], buf.shape[1]])
    load_tile(desc, [_ROWS, end, _ROWS - (end - row), column], barrier, view, pred=pred)
