"""Where attention's output, and the gradient of its queries, lie in memory.

B streams, H heads, L queries, P features of a head.
"""

import triton
import triton.language as tl
from torch import Tensor


def empty_output(q: Tensor, features: int) -> Tensor:
    """(B, H, L, `features`) like queries of a power of two of them, in the order (B, L, H, P): what
    reads it, a product over all heads' features, copies nothing."""
    batch, heads, num_queries, _ = q.shape
    return q.new_empty(batch, num_queries, heads, features).transpose(1, 2)


@triton.jit
def output_places(ptr, x, i, p, num_heads, L, FEATURES: tl.constexpr):
    """Of a head's queries in the order of `empty_output`. Known when compiled, 44 features are read
    and written four at a time."""
    row = (x // num_heads * L + i) * num_heads + x % num_heads
    return ptr + row[:, None] * FEATURES + p[None, :]
