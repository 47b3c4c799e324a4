"""Tokens to rows sorted by expert and back: passes without products.

    copy      rows of tokens in sorted order, for experts so wide that the copy pays
    combine   sums a token's rows, weighted by its gate

Shapes as in expert_forward.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.kernels.experts import Sizes, Source
from acmoe.kernels.tuning import copies_rows


@triton.jit(do_not_specialize=["num_tokens"])
def copy_kernel(
    x_ptr, back_ptr, out_ptr, num_tokens, D, top_k, BM: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """out (N, D): x at each of its K rows. Bytes: T D read, N D written."""
    tokens = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = tokens < num_tokens
    both = inside[:, None] & (cols < D)[None, :]
    value = tl.load(x_ptr + tokens[:, None].to(tl.int64) * D + cols[None, :], mask=both)
    for choice in range(top_k):
        row = tl.load(back_ptr + tokens * top_k + choice, mask=inside, other=0).to(tl.int64)
        tl.store(out_ptr + row[:, None] * D + cols[None, :], value, mask=both)


@triton.jit(do_not_specialize=["num_tokens"])
def combine_kernel(
    y_ptr,
    gate_ptr,
    back_ptr,
    out_ptr,
    last_ptr,
    num_tokens,
    D,
    top_k,
    HAS_GATE: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """out (T, D) = sum over a token's K rows of gate * y: gathers in the order of choice."""
    tokens = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = tokens < num_tokens
    known = cols < D
    total = tl.zeros((BM, BD), dtype=tl.float32)
    num_rows = tl.load(last_ptr)
    for choice in range(top_k):
        row = tl.load(back_ptr + tokens * top_k + choice, mask=inside, other=0).to(tl.int64)
        # A row for no expert stands behind the last expert's and was never written.
        written = (inside & (row < num_rows))[:, None] & known[None, :]
        y = tl.load(y_ptr + row[:, None] * D + cols[None, :], mask=written, other=0.0)
        y = y.to(tl.float32)
        if HAS_GATE:
            gate = tl.load(gate_ptr + tokens * top_k + choice, mask=inside, other=0.0)
            y *= gate.to(tl.float32)[:, None]
        total += y
    out_ptrs = out_ptr + tokens[:, None].to(tl.int64) * D + cols[None, :]
    both = inside[:, None] & known[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=both)


def source_of(x: Tensor, back: Tensor, size: Sizes, *, backward: bool = False) -> Source:
    """Rows where the copy pays (kernels/tuning.py), else the tokens themselves.

    back (N,): the row of each choice. Every row is some token's. Those for no expert stand last;
    what a last tile reads of them goes nowhere.
    """
    if not copies_rows(size.dim, size.hidden, size.experts, size.width, backward=backward):
        return Source(x, True)
    tokens, dim = x.shape
    rows = torch.empty(back.numel(), dim, device=x.device, dtype=x.dtype)
    height, block = _flat_tile(dim)
    copy_kernel[(triton.cdiv(tokens, height), triton.cdiv(dim, block))](
        *(x, back, rows, tokens, dim, size.top_k), BM=height, BD=block, num_warps=4
    )
    return Source(rows, False)


def _flat_tile(dim: int) -> tuple[int, int]:
    """Rows and columns of a pass without products: 2,048 numbers, and few columns that are not."""
    block = 64 if dim <= 64 else 128
    while block < 1024 and triton.cdiv(dim, 2 * block) * 2 == triton.cdiv(dim, block):
        block *= 2
    return 2048 // block, block


def run_combine(y: Tensor, gate: Tensor | None, back: Tensor, end: Tensor, tokens: int) -> Tensor:
    """(T, D): each token's rows, weighted by the gate or plainly summed."""
    dim = y.shape[1]
    out = torch.empty(tokens, dim, device=y.device, dtype=y.dtype)
    height, block = _flat_tile(dim)
    combine_kernel[(triton.cdiv(tokens, height), triton.cdiv(dim, block))](
        *(y, y if gate is None else gate, back, out, end[-1:], tokens, dim),
        back.numel() // tokens,
        HAS_GATE=gate is not None,
        BM=height,
        BD=block,
        num_warps=4,
    )
    return out
