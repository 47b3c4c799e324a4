"""Tokens to rows sorted by expert and back: passes without products.

    copy      rows of tokens in sorted order, for experts so wide that the copy pays
    combine   sums a token's rows, weighted by its gate

Shapes as in expert_forward.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.experts.triton.sizes import Sizes, Source

# Of a tile. Sums of 8 rows of 2048 features take 277 us on an H200 (4.37 TB/s), 285 with twice the
# warps, and took 301 in tiles of two rows, one choice after the other.
_NUMBERS, _WARPS = 2048, 4
# Choices whose loads are under way together. All of a usual layer's; of a dense mixture's 128 the
# code would take a minute to compile.
TOGETHER = tl.constexpr(16)


@triton.jit
def _tile(num_tokens, D, BM: tl.constexpr, BD: tl.constexpr):
    """Tokens and features of a program. Blocks of a row follow each other: memory is read and
    written by whole rows."""
    columns = tl.cdiv(D, BD)
    tokens = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    cols = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    inside = tokens < num_tokens
    return tokens, cols, inside, inside[:, None] & (cols < D)[None, :]


@triton.jit(do_not_specialize=["num_tokens"])
def copy_kernel(
    x_ptr, back_ptr, out_ptr, num_tokens, D, K: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """out (N, D): x at each of its K rows. Bytes: T D read, N D written."""
    tokens, cols, inside, both = _tile(num_tokens, D, BM, BD)
    value = tl.load(x_ptr + tokens[:, None].to(tl.int64) * D + cols[None, :], mask=both)
    for first in range(0, K, TOGETHER):
        rows = ()  # all asked for before a store, which no load may pass
        for i in tl.static_range(min(K, TOGETHER)):
            known = inside & (first + i < K)
            rows += (tl.load(back_ptr + tokens * K + first + i, mask=known, other=0),)
        for i in tl.static_range(min(K, TOGETHER)):
            wanted = both & (first + i < K)
            tl.store(out_ptr + rows[i][:, None] * D + cols[None, :], value, mask=wanted)


@triton.jit(do_not_specialize=["num_tokens"])
def combine_kernel(
    y_ptr,
    gate_ptr,
    back_ptr,
    out_ptr,
    last_ptr,
    num_tokens,
    D,
    K: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """out (T, D) = sum over a token's K rows of gate * y: gathers in the order of choice."""
    tokens, cols, inside, both = _tile(num_tokens, D, BM, BD)
    total = tl.zeros((BM, BD), dtype=tl.float32)
    num_rows = tl.load(last_ptr)
    for first in range(0, K, TOGETHER):
        for i in tl.static_range(min(K, TOGETHER)):
            known = inside & (first + i < K)
            row = tl.load(back_ptr + tokens * K + first + i, mask=known, other=0)
            # A row for no expert stands behind the last expert's and was never written.
            written = both & (known & (row < num_rows))[:, None]
            y = tl.load(y_ptr + row[:, None] * D + cols[None, :], mask=written, other=0.0)
            y = y.to(tl.float32)
            if HAS_GATE:
                gate = tl.load(gate_ptr + tokens * K + first + i, mask=known, other=0.0)
                y *= gate.to(tl.float32)[:, None]
            total += y
    out_ptrs = out_ptr + tokens[:, None].to(tl.int64) * D + cols[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=both)


def source_of(x: Tensor, back: Tensor, size: Sizes, *, gather: bool) -> Source:
    """The tokens themselves, to `gather` (ring_choice.py says when), else a copy of their rows.

    back (N,) int64: the row of each choice. Every row is some token's. Those for no expert stand
    last; what a last tile reads of them goes nowhere.
    """
    if gather:
        return Source(x, True)
    tokens, dim = x.shape
    rows = torch.empty(back.numel(), dim, device=x.device, dtype=x.dtype)
    height, block = _flat_tile(dim)
    copy_kernel[(triton.cdiv(tokens, height) * triton.cdiv(dim, block),)](
        *(x, back, rows, tokens, dim), K=size.top_k, BM=height, BD=block, num_warps=_WARPS
    )
    return Source(rows, False)


def _flat_tile(dim: int) -> tuple[int, int]:
    """Rows and columns of a pass without products: whole rows if they fit, else the widest block
    of those that go beyond their end the least."""
    block = max(64, triton.next_power_of_2(dim))
    if block > _NUMBERS:
        block = min((_NUMBERS, 1024, 512), key=lambda width: -dim % width)
    return _NUMBERS // block, block


def run_combine(y: Tensor, gate: Tensor | None, back: Tensor, end: Tensor, tokens: int) -> Tensor:
    """(T, D): each token's rows, weighted by the gate or plainly summed. back (N,) is int64."""
    dim = y.shape[1]
    out = torch.empty(tokens, dim, device=y.device, dtype=y.dtype)
    height, block = _flat_tile(dim)
    combine_kernel[(triton.cdiv(tokens, height) * triton.cdiv(dim, block),)](
        *(y, y if gate is None else gate, back, out, end[-1:], tokens, dim),
        K=back.numel() // tokens,
        HAS_GATE=gate is not None,
        BM=height,
        BD=block,
        num_warps=_WARPS,
    )
    return out
