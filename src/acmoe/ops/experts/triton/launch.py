"""Launches of the expert kernels: block sizes, grids, buffers.

T tokens, K experts per token, N = T * K rows, D features, F hidden units, E experts, W = F or 2F.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from acmoe.ops.device.dot import dot_precision
from acmoe.ops.device.dropout_rng import threshold
from acmoe.ops.device.tuning import Blocks, blocks_for
from acmoe.ops.experts.triton.backward import activation_kernel, finish_kernel
from acmoe.ops.experts.triton.forward import rows_kernel, up_kernel
from acmoe.ops.experts.triton.persistent_weights import persistent_weight_kernel
from acmoe.ops.experts.triton.sizes import Shares, Sizes, Source, Sums
from acmoe.ops.experts.triton.tiles import Plan
from acmoe.ops.experts.triton.weights import add_kernel, weight_kernel

GROUP = 8  # row tiles that walk over the columns together, and find the weights in L2
# Rows of a program and of a step, columns, and warps of the activation's backward.
ACTIVATION_TILE = (128, 8, 128, 4)


def _blocks(kernel: str, size: Sizes, dtype: torch.dtype) -> Blocks:
    blocks = blocks_for(kernel, size.dim, size.hidden, size.experts, dtype)
    # The table does not know the activation: gate and up need room for two tiles of weights, and
    # their accumulators all registers.
    two = kernel == "up" and size.act == "swiglu"
    if two:
        blocks = blocks._replace(n=min(blocks.n, 128))
    aligned = size.dim * dtype.itemsize % 16 == 0 and size.hidden * dtype.itemsize % 16 == 0
    if not (aligned and blocks.tma):
        return blocks._replace(tma=False, persistent=0)
    if two and blocks.num_warps < 8:
        return blocks._replace(num_warps=8, persistent=min(blocks.persistent, 1))
    return blocks


def _programs(tiles: int, blocks: Blocks) -> int:
    """One a tile, or few that take many; without a GPU so few that some do take many."""
    if not blocks.persistent:
        return tiles
    if not torch.cuda.is_available():
        return min(tiles, 3)
    processors = torch.cuda.get_device_properties().multi_processor_count
    return min(tiles, blocks.persistent * processors)


def _desc(tensor: Tensor, block: list[int], blocks: Blocks) -> Any:
    """A tensor-map of a matrix, or the tensor itself where the copy engine is not used."""
    if not blocks.tma:
        return tensor
    flat = tensor.reshape(-1, tensor.shape[-1])
    return TensorDescriptor.from_tensor(on_line(flat), block)


def on_line(tensor: Tensor) -> Tensor:
    """From a multiple of 16 bytes on, as the copy engine reads; a view may begin anywhere."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _up_desc(up: Tensor, size: Sizes, blocks: Blocks) -> Any:
    """Gate and up are one block of twice the rows: one product, which reads x once."""
    if size.act != "swiglu" or not blocks.tma:
        return _desc(up, [blocks.n, blocks.k], blocks)
    pairs = up.reshape(2 * size.experts, size.hidden, size.dim)
    return TensorDescriptor.from_tensor(on_line(pairs), [2, blocks.n, blocks.k])


def _launch(blocks: Blocks, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernels of products have in common."""
    return {
        "GROUP": GROUP,
        "TMA": blocks.tma,
        "PRECISION": dot_precision(dtype),
        "BM": blocks.m,
        "BN": blocks.n,
        "BK": blocks.k,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def run_up(
    source: Source,
    up: Tensor,
    up_bias: Tensor | None,
    plan: Plan,
    size: Sizes,
    dropout: float,
    seed: Tensor,
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """h (N, W) before the activation, no rows of it unless to keep; a (N, F) after activation and
    dropout."""
    x, rows = source.values, plan.num_rows
    h = torch.empty(rows if keep else 0, size.width, device=x.device, dtype=x.dtype)
    a = torch.empty(rows, size.hidden, device=x.device, dtype=x.dtype)
    blocks = _blocks("up", size, x.dtype)
    expert, start = plan[blocks.m]
    num_n = triton.cdiv(size.hidden, blocks.n)
    up_kernel[(_programs(expert.numel() * num_n, blocks),)](
        *(x, x if source.gather else _desc(x, [blocks.m, blocks.k], blocks)),
        *(up, _up_desc(up, size, blocks)),
        *(up if up_bias is None else up_bias, h, a, plan.token, expert, start),
        *(plan.end, plan.live(blocks.m), seed),
        *(size.dim, size.hidden, expert.numel(), num_n),
        PERSISTENT=blocks.persistent > 0,
        GATHER=source.gather,
        KEEP=keep,
        ACT=size.act,
        HAS_BIAS=up_bias is not None,
        DROPPED=threshold(dropout),
        EVEN_K=size.dim % blocks.k == 0,
        WHOLE=size.hidden >= blocks.n,
        **_launch(blocks, x.dtype),
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
    """(N, O): rows times their expert's weight, (E, O, I), or (E, I, O) if `across`.

    `gather`: a holds tokens (T, I), fetched row by row.
    """
    rows, inner = plan.num_rows, a.shape[1]
    outer = weight.shape[2] if across else weight.shape[1]
    y = torch.empty(rows, outer, device=a.device, dtype=a.dtype)
    blocks = _blocks(kernel, size, a.dtype)
    expert, start = plan[blocks.m]
    num_n = triton.cdiv(outer, blocks.n)
    w_block = [blocks.k, blocks.n] if across else [blocks.n, blocks.k]
    rows_kernel[(_programs(expert.numel() * num_n, blocks),)](
        *(a, _desc(a, [blocks.m, blocks.k], blocks), weight, _desc(weight, w_block, blocks)),
        *(weight if bias is None else bias, y, plan.token, expert, start),
        *(plan.end, plan.live(blocks.m)),
        *(inner, outer, expert.numel(), num_n),
        PERSISTENT=blocks.persistent > 0,
        GATHER=gather,
        ACROSS=across,
        HAS_BIAS=bias is not None,
        EVEN_K=inner % blocks.k == 0,
        WHOLE=outer >= blocks.n,
        **_launch(blocks, a.dtype),
    )
    return y


def run_activation(
    da: Tensor,
    h: Tensor,
    dh: Tensor,
    gate: Tensor,
    grad: Tensor,
    plan: Plan,
    size: Sizes,
    sums: Sums,
    dropout: float,
    seed: Tensor,
) -> Shares:
    """Writes dh (N, W), maybe over h, and gate * a (N, F) over da; the rest is for `run_finish`."""
    height, rows, block, warps = ACTIVATION_TILE
    block = min(block, triton.next_power_of_2(size.hidden))
    expert, start = plan[height]
    num_blocks = triton.cdiv(size.hidden, block)
    share = torch.empty(num_blocks, plan.num_rows, device=h.device)
    part = torch.empty(expert.numel(), sum(sums), device=h.device)
    activation_kernel[(expert.numel(), num_blocks + triton.cdiv(sums.down, block))](
        *(da, h, dh, gate, grad, share, part, plan.order, expert, start, plan.end, seed),
        *(plan.num_rows, size.dim, size.hidden, num_blocks, size.top_k),
        ACT=size.act,
        UP_BIAS=sums.up > 0,
        DOWN_BIAS=sums.down > 0,
        DROPPED=threshold(dropout),
        HEIGHT=height,
        BM=rows,
        BN=block,
        num_warps=warps,
    )
    return Shares(share, part)


def run_finish(
    shares: Shares,
    by_bias: Tensor | None,
    expert_N: Tensor,
    plan: Plan,
    size: Sizes,
    sums: Sums,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dgate (T, K) in float32; (E, W) and (E, D) of the biases, without columns where none is."""
    dgate = torch.empty(size.tokens, size.top_k, device=plan.end.device)
    d_up, d_down = (
        torch.empty(size.experts, columns, device=dgate.device, dtype=dtype) for columns in sums
    )
    height, width = 16, 64
    columns = triton.cdiv(sum(sums), width)
    finish_kernel[(size.experts * columns + triton.cdiv(plan.num_rows, height * width),)](
        *(*shares, dgate if by_bias is None else by_bias, dgate, d_up, d_down),
        *(plan.order, expert_N, plan.end, plan.num_rows, shares.gate.shape[0]),
        *(size.experts, size.top_k, *sums, columns),
        HEIGHT=ACTIVATION_TILE[0],
        BE=triton.next_power_of_2(size.experts),
        BM=height,
        BN=width,
        num_warps=4,
    )
    return dgate, d_up, d_down


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
    """(E, O, I) sums of outer products p^T q over each expert's rows, in p's dtype or another.

    gather: "p" or "q" for the one that holds tokens, "none" where both hold rows.
    """
    outer, inner = p.shape[1], q.shape[1]
    blocks = _blocks(kernel, size, p.dtype)
    tiles = triton.cdiv(inner, blocks.n) * triton.cdiv(outer, blocks.m)
    splits = blocks.splits or _splits(tiles * size.experts, plan.num_rows // size.experts, blocks.k)
    dtype = dtype or p.dtype
    kept = dtype if splits == 1 else torch.float32
    dw = torch.empty(size.experts, splits, outer, inner, device=p.device, dtype=kept)
    parts = size.experts * splits
    factors = (
        *(p, _desc(p, [blocks.k, blocks.m], blocks)),
        *(q, _desc(q, [blocks.k, blocks.n], blocks)),
    )
    how = {"WHOLE": outer >= blocks.m and inner >= blocks.n} | _launch(blocks, p.dtype)
    if blocks.persistent and gather == "none":
        persistent_weight_kernel[(_programs(tiles * parts, blocks),)](
            *(*factors, dw, plan.end, outer, inner, splits, parts, plan.num_rows),
            BP=max(128, triton.next_power_of_2(parts)),
            **how,
        )
    else:
        weight_kernel[(tiles, parts)](
            *(*factors, dw, plan.token, plan.end, outer, inner, splits), GATHER=gather, **how
        )
    return dw[:, 0] if splits == 1 else _add(dw, dtype)


def _add(dw: Tensor, dtype: torch.dtype) -> Tensor:
    """(E, O, I): the sum of (E, splits, O, I)."""
    experts, splits, outer, inner = dw.shape
    out = torch.empty(experts, outer, inner, device=dw.device, dtype=dtype)
    size = outer * inner
    add_kernel[(experts, triton.cdiv(size, 1024))](dw, out, size, splits, BN=1024, num_warps=4)
    return out


def _splits(tiles: int, rows_per_expert: int, block_k: int) -> int:
    """How often to split an expert's rows: three programs a multiprocessor, 8 blocks each."""
    if not torch.cuda.is_available():
        return 2 if rows_per_expert >= 2 * block_k else 1
    processors = torch.cuda.get_device_properties().multi_processor_count
    return max(1, min(8, 3 * processors // tiles, rows_per_expert // (8 * block_k)))
