"""Permute tokens to rows sorted by expert, and combine rows back to tokens.

    permute   rows (N, D): rows[inverse[t * K + k]] = x[t], for experts so wide that the copy pays
    combine   out (T, D): out[t] = sum over k of gate[t, k] * y[inverse[t * K + k]]

inverse (N,) is the sorted row of each choice t * K + k. A program handles a tile of 2048 elements,
BM tokens by BD features, and all K choices of its tokens. Both are bound by memory: permute reads
T * D elements and writes N * D, combine reads N * D and writes T * D.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2
from acmoe.ops.experts.triton.sizes import RowOperand, Sizes

# Elements and warps of a tile. Combining 8 rows of 2048 features takes 277 us on an H200 (4.37
# TB/s), 285 with twice the warps, and took 301 in tiles of two rows with the choices not unrolled.
_TILE_ELEMENTS, _WARPS = 2048, 4
# Choices that are unrolled, so that their loads are in flight together. This covers all choices of
# a usual layer; unrolling the 128 of a dense mixture would take a minute to compile.
UNROLL = tl.constexpr(16)


@triton.jit
def _tile_indices(num_tokens, D, BM: tl.constexpr, BD: tl.constexpr):
    """Return a program's tokens (BM,), features (BD,), token mask (BM,) and mask (BM, BD).

    Consecutive programs handle the column blocks of the same tokens, so that memory is read and
    written by whole rows.
    """
    columns = tl.cdiv(D, BD)
    tokens = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    cols = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    token_mask = tokens < num_tokens
    return tokens, cols, token_mask, token_mask[:, None] & (cols < D)[None, :]


@triton.jit(do_not_specialize=["num_tokens"])
def permute_kernel(
    x_ptr, inverse_ptr, out_ptr, num_tokens, D, K: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Write out (N, D) with out[inverse[t * K + k]] = x[t]: T * D elements read, N * D written."""
    tokens, cols, token_mask, mask = _tile_indices(num_tokens, D, BM, BD)
    value = tl.load(x_ptr + tokens[:, None].to(tl.int64) * D + cols[None, :], mask=mask)
    for first in range(0, K, UNROLL):
        rows = ()  # load all indices before the first store: the compiler moves no load above one
        for i in tl.static_range(min(K, UNROLL)):
            valid = token_mask & (first + i < K)
            rows += (tl.load(inverse_ptr + tokens * K + first + i, mask=valid, other=0),)
        for i in tl.static_range(min(K, UNROLL)):
            mask_i = mask & (first + i < K)
            tl.store(out_ptr + rows[i][:, None] * D + cols[None, :], value, mask=mask_i)


@triton.jit(do_not_specialize=["num_tokens"])
def combine_kernel(
    y_ptr,
    gate_ptr,
    inverse_ptr,
    out_ptr,
    num_routed_ptr,
    num_tokens,
    D,
    K: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """Compute out[t] (D,) = sum over k of gate[t, k] * y[inverse[t * K + k]], in order of k.

    num_routed: the number of rows that were routed to an expert, offsets[-1].
    """
    tokens, cols, token_mask, mask = _tile_indices(num_tokens, D, BM, BD)
    acc = tl.zeros((BM, BD), dtype=tl.float32)
    num_routed = tl.load(num_routed_ptr)
    for first in range(0, K, UNROLL):
        for i in tl.static_range(min(K, UNROLL)):
            valid = token_mask & (first + i < K)
            row = tl.load(inverse_ptr + tokens * K + first + i, mask=valid, other=0)
            # Rows routed to no expert come after the last expert's rows and were never written.
            row_mask = mask & (valid & (row < num_routed))[:, None]
            y = tl.load(y_ptr + row[:, None] * D + cols[None, :], mask=row_mask, other=0.0)
            y = y.to(tl.float32)
            if HAS_GATE:
                gate = tl.load(gate_ptr + tokens * K + first + i, mask=valid, other=0.0)
                y *= gate.to(tl.float32)[:, None]
            acc += y
    out_ptrs = out_ptr + tokens[:, None].to(tl.int64) * D + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def row_operand(x: Tensor, inverse: Tensor, size: Sizes, *, gather: bool) -> RowOperand:
    """Return x (T, D) itself if `gather`, else a copy of its rows (N, D) in sorted order.

    hopper/choice.py decides which.
    inverse (N,) int64: the sorted row of each choice. Every row holds some token. Rows routed to no
    expert come last; an expert's last tile may read them, but no result of that is stored.
    """
    if gather:
        return RowOperand(x, True)
    tokens, dim = x.shape
    rows = torch.empty(inverse.numel(), dim, device=x.device, dtype=x.dtype)
    height, block = _tile_shape(dim)
    launch(
        *(permute_kernel, (cdiv(tokens, height) * cdiv(dim, block),)),
        *(x, inverse, rows, tokens, dim),
        K=size.top_k,
        BM=height,
        BD=block,
        num_warps=_WARPS,
    )
    return RowOperand(rows, False)


def _tile_shape(dim: int) -> tuple[int, int]:
    """Return (BM, BD): whole rows if they fit in a tile, else the width that wastes the least."""
    block = max(64, next_power_of_2(dim))
    if block > _TILE_ELEMENTS:
        block = min((_TILE_ELEMENTS, 1024, 512), key=lambda width: -dim % width)
    return _TILE_ELEMENTS // block, block


def run_combine(
    y: Tensor, gate: Tensor | None, inverse: Tensor, offsets: Tensor, tokens: int
) -> Tensor:
    """Return (T, D), the sum of each token's rows of y (N, D), weighted by gate (T, K) if given.

    inverse (N,) int64: the sorted row of each choice; offsets (E,): the end of each expert's rows.
    """
    dim = y.shape[1]
    out = torch.empty(tokens, dim, device=y.device, dtype=y.dtype)
    height, block = _tile_shape(dim)
    launch(
        *(combine_kernel, (cdiv(tokens, height) * cdiv(dim, block),)),
        *(y, y if gate is None else gate, inverse, out, offsets[-1:], tokens, dim),
        K=inverse.numel() // tokens,
        HAS_GATE=gate is not None,
        BM=height,
        BD=block,
        num_warps=_WARPS,
    )
    return out
