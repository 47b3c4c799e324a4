"""Sort routed rows by expert and tokens by cluster."""

from acmoe.ops.sort import op as _kernels  # noqa: F401, registers them
from acmoe.ops.sort.reference import Rows, sort_rows

__all__ = ["Rows", "sort_rows"]
