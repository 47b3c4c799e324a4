"""Launches of the experts' Triton GEMMs: block sizes, grids, TMA descriptors, output buffers.

T tokens, K experts each, N = T * K rows, D features, F hidden units, E experts, W = F (swiglu: 2F).
"""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.device.dot import dot_precision
from acmoe.ops.device.dropout_rng import drop_threshold
from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2, tma_aligned
from acmoe.ops.experts.settings.lookup import blocks_for
from acmoe.ops.experts.triton.forward import grouped_gemm_kernel, up_kernel
from acmoe.ops.experts.triton.persistent_weights import persistent_weight_kernel
from acmoe.ops.experts.triton.sizes import RowOperand, Sizes
from acmoe.ops.experts.triton.tiles import Plan
from acmoe.ops.experts.triton.weights import reduce_splits_kernel, weight_kernel

# Shared memory of a program where blocks are persistent (`has_large_shared_memory`), less some for
# barriers.
_SHARED_BYTES = 227 * 1024 - 1024
GROUP_M = 8  # row tiles that iterate over the columns together and share the weights in L2


def _blocks(kernel: str, size: Sizes, dtype: torch.dtype) -> Blocks:
    """Return the tuned block sizes, changed where activation or alignment require it."""
    layer = size.layer(dtype)
    blocks = blocks_for(kernel, layer)
    # The table does not depend on the activation. SwiGLU's gate and up need shared memory for two
    # tiles of weights, and their two accumulators need the registers of 8 warps.
    gated = kernel == "up" and size.act == "swiglu"
    if gated:
        blocks = blocks._replace(n=min(blocks.n, 128))
    if not (layer.aligned and blocks.tma):
        return blocks._replace(tma=False, persistent=0)
    if gated and blocks.num_warps < 8 and blocks.m * blocks.n >= 128 * 128:
        return blocks._replace(num_warps=8, persistent=min(blocks.persistent, 1))
    return blocks


def _persistent_if_it_fits(blocks: Blocks, dtype: torch.dtype, result: torch.dtype) -> Blocks:
    """Return the blocks of a weight gradient; not persistent ones where shared memory is too small.

    The persistent kernel holds its stages, the remainder of an expert's rows and, while it stores
    it, the tile: twice as much in float32. With fewer stages it took 12 to 19% longer than the
    other kernel at olmoe, qwen30b and mixtral, and 6% less with 256 rows an expert (H200).
    """
    tile = blocks.m * blocks.n * result.itemsize
    stage = (blocks.m + blocks.n) * blocks.k * dtype.itemsize
    if not blocks.persistent or tile + (blocks.num_stages + 1) * stage <= _SHARED_BYTES:
        return blocks
    return blocks._replace(k=64, num_stages=3, persistent=0)


def _num_programs(tiles: int, blocks: Blocks) -> int:
    """Return the grid size: one program a tile, or `persistent` programs a multiprocessor.

    Without a GPU a persistent launch has 3 programs, so that tests see programs with many tiles.
    """
    if not blocks.persistent:
        return tiles
    if not torch.cuda.is_available():
        return min(tiles, 3)
    num_sms = torch.cuda.get_device_properties().multi_processor_count
    return min(tiles, blocks.persistent * num_sms)


def _desc(tensor: Tensor, block: list[int], blocks: Blocks) -> Any:
    """Return a TMA descriptor of the tensor as a matrix; without TMA the tensor itself."""
    if not blocks.tma:
        return tensor
    flat = tensor.reshape(-1, tensor.shape[-1])
    return TensorDescriptor.from_tensor(tma_aligned(flat), block)


def _up_desc(up: Tensor, size: Sizes, blocks: Blocks) -> Any:
    """Return up's descriptor; a block of swiglu is BN gate rows and BN up rows, for one MMA."""
    if size.act != "swiglu" or not blocks.tma:
        return _desc(up, [blocks.n, blocks.k], blocks)
    gate_and_up = up.reshape(2 * size.experts, size.hidden, size.dim)
    return TensorDescriptor.from_tensor(tma_aligned(gate_and_up), [2, blocks.n, blocks.k])


def _launch_options(blocks: Blocks, dtype: torch.dtype) -> dict[str, Any]:
    """Return the keyword arguments that all GEMM kernels take."""
    return {
        "GROUP_M": GROUP_M,
        "TMA": blocks.tma,
        "PRECISION": dot_precision(dtype),
        "BM": blocks.m,
        "BN": blocks.n,
        "BK": blocks.k,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def run_up(
    rows_in: RowOperand,
    up: Tensor,
    up_bias: Tensor | None,
    plan: Plan,
    size: Sizes,
    dropout: float,
    seed: Tensor,
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return h (N, W) = rows @ up[e]^T + up_bias[e] and a (N, F) = dropout(act(h)).

    keep: store h for the backward; otherwise h has no rows.
    """
    x, rows = rows_in.values, plan.num_rows
    h = torch.empty(rows if keep else 0, size.width, device=x.device, dtype=x.dtype)
    a = torch.empty(rows, size.hidden, device=x.device, dtype=x.dtype)
    blocks = _blocks("up", size, x.dtype)
    expert, start = plan[blocks.m]
    num_n = cdiv(size.hidden, blocks.n)
    launch(
        *(up_kernel, (_num_programs(expert.numel() * num_n, blocks),)),
        *(x, x if rows_in.gather else _desc(x, [blocks.m, blocks.k], blocks)),
        *(up, _up_desc(up, size, blocks)),
        *(up if up_bias is None else up_bias, h, a, plan.token, expert, start),
        *(plan.offsets, plan.num_used(blocks.m), seed),
        *(size.dim, size.hidden, expert.numel(), num_n),
        PERSISTENT=blocks.persistent > 0,
        BY_EXPERT=plan.by_expert(blocks.m, up),
        GATHER=rows_in.gather,
        SAVE_H=keep,
        ACT=size.act,
        HAS_BIAS=up_bias is not None,
        DROP_THRESHOLD=drop_threshold(dropout),
        EVEN_K=size.dim % blocks.k == 0,
        SHIFT_EDGE=size.hidden >= blocks.n,
        **_launch_options(blocks, x.dtype),
    )
    return h, a


def run_rows(
    kernel: str,
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    size: Sizes,
    *,
    across: bool = False,
    gather: bool = False,
) -> Tensor:
    """Return (N, O) = a @ weight[e]^T + bias[e] for weight (E, O, I), or a @ weight[e] if `across`.

    across: weight is (E, I, O).
    gather: a holds tokens (T, I), which are gathered, instead of sorted rows (N, I).
    """
    rows, inner = plan.num_rows, a.shape[1]
    outer = weight.shape[2] if across else weight.shape[1]
    y = torch.empty(rows, outer, device=a.device, dtype=a.dtype)
    blocks = _blocks(kernel, size, a.dtype)
    expert, start = plan[blocks.m]
    num_n = cdiv(outer, blocks.n)
    w_block = [blocks.k, blocks.n] if across else [blocks.n, blocks.k]
    launch(
        *(grouped_gemm_kernel, (_num_programs(expert.numel() * num_n, blocks),)),
        *(a, _desc(a, [blocks.m, blocks.k], blocks), weight, _desc(weight, w_block, blocks)),
        *(weight if bias is None else bias, y, plan.token, expert, start),
        *(plan.offsets, plan.num_used(blocks.m)),
        *(inner, outer, expert.numel(), num_n),
        PERSISTENT=blocks.persistent > 0,
        BY_EXPERT=plan.by_expert(blocks.m, weight),
        GATHER=gather,
        WEIGHT_IO=across,
        HAS_BIAS=bias is not None,
        EVEN_K=inner % blocks.k == 0,
        SHIFT_EDGE=outer >= blocks.n,
        **_launch_options(blocks, a.dtype),
    )
    return y


def run_weight(
    kernel: str,
    p: Tensor,
    q: Tensor,
    plan: Plan,
    size: Sizes,
    *,
    gather: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return (E, O, I): p^T q summed over each expert's rows, in `dtype`, by default p's.

    gather: "p" or "q" for the operand that holds tokens to gather, "none" where both hold rows.
    """
    outer, inner = p.shape[1], q.shape[1]
    blocks = _blocks(kernel, size, p.dtype)
    tiles = cdiv(inner, blocks.n) * cdiv(outer, blocks.m)
    splits = blocks.splits or _choose_splits(
        tiles * size.experts, plan.num_rows // size.experts, blocks.k
    )
    dtype = dtype or p.dtype
    partial_dtype = dtype if splits == 1 else torch.float32
    blocks = _persistent_if_it_fits(blocks, p.dtype, partial_dtype)
    dw = torch.empty(size.experts, splits, outer, inner, device=p.device, dtype=partial_dtype)
    num_k_slices = size.experts * splits
    operands = (
        *(p, _desc(p, [blocks.k, blocks.m], blocks)),
        *(q, _desc(q, [blocks.k, blocks.n], blocks)),
    )
    options = {"SHIFT_EDGE": outer >= blocks.m and inner >= blocks.n} | _launch_options(
        blocks, p.dtype
    )
    if blocks.persistent and gather == "none":
        launch(
            *(persistent_weight_kernel, (_num_programs(tiles * num_k_slices, blocks),)),
            *(*operands, dw, plan.offsets, outer, inner, splits, num_k_slices, plan.num_rows),
            BP=max(128, next_power_of_2(num_k_slices)),
            **options,
        )
    else:
        launch(
            *(weight_kernel, (tiles, num_k_slices)),
            *(*operands, dw, plan.token, plan.offsets, outer, inner, splits),
            GATHER=gather,
            **options,
        )
    return dw[:, 0] if splits == 1 else _reduce_splits(dw, dtype)


def _reduce_splits(dw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (E, O, I), the sum of dw (E, splits, O, I) over the splits."""
    experts, splits, outer, inner = dw.shape
    out = torch.empty(experts, outer, inner, device=dw.device, dtype=dtype)
    size = outer * inner
    launch(
        *(reduce_splits_kernel, (experts, cdiv(size, 1024)), dw, out, size, splits),
        BN=1024,
        num_warps=4,
    )
    return out


def _choose_splits(tiles: int, rows_per_expert: int, block_k: int) -> int:
    """Return the split-K factor for 3 programs a multiprocessor with at least 8 K blocks each."""
    if not torch.cuda.is_available():
        return 2 if rows_per_expert >= 2 * block_k else 1
    num_sms = torch.cuda.get_device_properties().multi_processor_count
    return max(1, min(8, 3 * num_sms // tiles, rows_per_expert // (8 * block_k)))
