"""What the programs of a launch left behind, added up in a fixed order.

Floor: G N M float32 read.

G sums of N parts each, of M numbers.
"""

import triton
import triton.language as tl
from torch import Tensor

STEP = 2048  # numbers of a program's step, or more where so many parts make it more
COLUMNS = 8  # at least: 32 bytes, what memory is read in
_MOST_ROWS = 1024  # parts a step: a long sum is a few waits for memory, not one for each 128 parts


def totals(partial_GNM: Tensor) -> tuple[Tensor, ...]:
    """G tensors (M,), each with memory of its own. G is 1 or 2."""
    G, N, M = partial_GNM.shape
    rows = min(_MOST_ROWS, max(16, triton.next_power_of_2(N)))
    columns = max(COLUMNS, STEP // rows)
    out = [partial_GNM.new_empty(M) for _ in range(G)]
    _total_kernel[(triton.cdiv(M, columns), G)](
        *(partial_GNM, out[0], out[-1], N, M),
        BN=rows,
        BM=columns,
        num_warps=8 if rows * columns > STEP else 4,
    )
    return tuple(out)


@triton.jit
def _total_kernel(
    partial_ptr, first_ptr, second_ptr, N, M, BN: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    partial_ptr += tl.program_id(1).to(tl.int64) * N * M
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        known = (n[:, None] < N) & (m[None, :] < M)
        at = n.to(tl.int64)[:, None] * M + m[None, :]
        total += tl.load(partial_ptr + at, mask=known, other=0.0)
    out_ptr = first_ptr if tl.program_id(1) == 0 else second_ptr
    tl.store(out_ptr + m, tl.sum(total, axis=0), mask=m < M)
