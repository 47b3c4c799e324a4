"""Memory layout of the attention output and of the gradient of the queries: (B, L, H, P).

The kernels of this folder address both tensors with `output_ptrs`. The heads of a token are
contiguous, so the GEMM of the output projection over all H * P features reads them without a copy.

Shapes: B batch, H heads, L queries, P head dimension.
"""

import triton
import triton.language as tl
from torch import Tensor


def empty_output(q: Tensor, features: int) -> Tensor:
    """Allocate (B, H, L, `features`) as a transposed view of contiguous (B, L, H, `features`).

    q is (B, H, L, P) with P padded to a power of two; `features` is the head dimension stored.
    """
    batch, heads, num_queries, _ = q.shape
    return q.new_empty(batch, num_queries, heads, features).transpose(1, 2)


@triton.jit
def output_ptrs(ptr, x, i, p, num_heads, L, OUT_DIM: tl.constexpr):
    """Pointers to features p of queries i of head x in a tensor made by `empty_output`.

    OUT_DIM is known at compile time, so that rows of 44 features are loaded and stored four
    elements at a time.
    """
    row = (x // num_heads * L + i) * num_heads + x % num_heads
    return ptr + row[:, None] * OUT_DIM + p[None, :]
