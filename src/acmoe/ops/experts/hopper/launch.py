"""Launches of the Hopper GEMMs with a multistage TMA pipeline (pipeline.py).

This module imports Gluon, so that choice.py imports it only where these kernels run.
`PipelineConfig` holds their settings.

N rows sorted by expert, T tokens, D features, F hidden units, E experts; e is the expert of a row.
"""

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from acmoe.ops.device.gluon_blocks import HALF_M, PANEL
from acmoe.ops.device.launcher import cdiv, launch, multiprocessors, tma_aligned
from acmoe.ops.device.tma import describe
from acmoe.ops.experts.hopper import columns as columns_module
from acmoe.ops.experts.hopper import hidden as hidden_module
from acmoe.ops.experts.hopper import rows as rows_module
from acmoe.ops.experts.hopper import tokens as tokens_module
from acmoe.ops.experts.hopper import up as up_module
from acmoe.ops.experts.hopper import weights as weights_module
from acmoe.ops.experts.hopper.ragged import ragged_desc
from acmoe.ops.experts.settings.gemms import (
    COLUMNS,
    PIPELINE_BK,
    PIPELINE_BM,
    PipelineConfig,
)
from acmoe.ops.experts.triton.launch import GROUP_M
from acmoe.ops.experts.triton.tiles import Plan

_PANEL = [HALF_M.value, PANEL.value]  # rows of half a tile, and columns of a panel
_HALF = [HALF_M.value, 2 * PANEL.value]  # the block of a result that one TMA store writes
UP_COLUMNS = up_module.COLUMNS.value
UP_STAGES = 4  # each takes 48 KiB of shared memory
TILE_ROWS = columns_module.TILE_ROWS.value
_PART, _EXTRA, _WEIGHT_BLOCK = (
    [size.value, PIPELINE_BK]
    for size in (columns_module.PART_ROWS, columns_module.EXTRA_ROWS, columns_module.WEIGHT_ROWS)
)
# Stages of a weight gradient in float32, whose panels take twice the shared memory: 64 KiB.
FLOAT32_STAGES = 3
# Blocks that the producer has yet to load of a tile when the program takes its next one. An atomic
# takes about as long as the MMAs of one or two blocks.
AHEAD = 4


def _desc(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor of the tensor as a matrix, copied first if it is not aligned."""
    return describe(tma_aligned(tensor.reshape(-1, tensor.shape[-1])), block)


def _asks_at(num_k: int) -> int:
    """Return the block of a tile after which the program takes its next one."""
    return max(num_k - 1 - AHEAD, 0)


def _tiles(narrow: int, wide: int, settings: PipelineConfig) -> int:
    """Return the number of tiles of one expert's weight gradient."""
    return cdiv(narrow, PIPELINE_BM) * cdiv(wide, settings.columns)


def launch_rows(
    a: Tensor, weight: Tensor, plan: Plan, settings: PipelineConfig, *, across: bool
) -> Tensor:
    """Return (N, O) = a @ weight[e]^T for weight (E, O, I), or if `across` a @ weight[e].

    across: weight is (E, I, O).
    """
    cooperative, num_k = settings.form == "cooperative", a.shape[1] // PIPELINE_BK
    counter, asks_at = (plan.counter, _asks_at(num_k)) if cooperative else (None, None)
    outer = weight.shape[2] if across else weight.shape[1]
    y = torch.empty(plan.num_rows, outer, device=a.device, dtype=a.dtype)
    expert, start = plan[PIPELINE_BM]
    w_block = [PIPELINE_BK, settings.columns] if across else [settings.columns, PIPELINE_BK]
    launch(
        *(rows_module.rows_gemm_kernel, (multiprocessors(),)),
        *(_desc(a, [PIPELINE_BM, PIPELINE_BK]), _desc(weight, w_block), describe(y, _HALF), y),
        *(expert, start, plan.offsets, plan.num_used(PIPELINE_BM), counter),
        *(num_k, cdiv(outer, settings.columns), asks_at, weight.shape[1], outer),
        GROUP_M=GROUP_M,
        BY_EXPERT=plan.by_expert(PIPELINE_BM, weight),
        WEIGHT_IO=across,
        STAGES=settings.stages,
        COOPERATIVE=cooperative,
        num_warps=4,
    )
    return y


def launch_up(x: Tensor, up: Tensor, plan: Plan, hidden: int) -> Tensor:
    """Return a (N, F) = silu(x[token] @ gate[e]^T) * (x[token] @ up[e]^T) for up (E, 2F, D)."""
    a = torch.empty(plan.num_rows, hidden, device=x.device, dtype=x.dtype)
    num_k = x.shape[1] // PIPELINE_BK
    expert, start = plan[PIPELINE_BM]
    launch(
        *(up_module.up_swiglu_kernel, (multiprocessors(),)),
        *(tma_aligned(x), plan.token, _desc(up, [UP_COLUMNS, PIPELINE_BK]), a),
        *(expert, start, plan.offsets, plan.num_used(PIPELINE_BM), plan.counter),
        *(cdiv(hidden, UP_COLUMNS), num_k, _asks_at(num_k), hidden),
        GROUP_M=GROUP_M,
        BY_EXPERT=plan.by_expert(PIPELINE_BM, up),
        STAGES=UP_STAGES,
        num_warps=4,
    )
    return a


def launch_hidden(
    x: Tensor,
    down: Tensor,
    h: Tensor,
    dh: Tensor,
    gate: Tensor,
    plan: Plan,
    settings: PipelineConfig,
) -> tuple[Tensor, Tensor]:
    """Return gate * a (N, F) and partial sums (B, N) of the gate's gradient; write dh (N, 2F)."""
    _, dim, hidden = down.shape
    rows, num_k = plan.num_rows, dim // PIPELINE_BK
    cooperative = settings.form == "cooperative"
    counter, asks_at = (plan.counter, _asks_at(num_k)) if cooperative else (None, None)
    a = torch.empty(rows, hidden, device=h.device, dtype=h.dtype)
    num_n = cdiv(hidden, settings.columns)
    dgate = torch.empty(num_n, rows, device=h.device)
    expert, start = plan[PIPELINE_BM]
    launch(
        *(hidden_module.hidden_gradient_kernel, (multiprocessors(),)),
        *(_desc(x, [PIPELINE_BM, PIPELINE_BK]), _desc(down, [PIPELINE_BK, settings.columns])),
        *(_desc(h, _PANEL), describe(dh, _PANEL), describe(a, _PANEL)),
        *(dh, a, dgate, gate, plan.permutation),
        *(expert, start, plan.offsets, plan.num_used(PIPELINE_BM), counter),
        *(rows, num_k, num_n, asks_at, dim, hidden),
        GROUP_M=GROUP_M,
        BY_EXPERT=plan.by_expert(PIPELINE_BM, down),
        STAGES=settings.stages,
        BUFFERS=settings.buffers,
        COOPERATIVE=cooperative,
        num_warps=4,
    )
    return a, dgate


def launch_weights(
    p: Tensor, q: Tensor, plan: Plan, settings: PipelineConfig, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return (E, O, I): p^T q summed over each expert's rows; p and q both hold rows.

    dtype: float32, or None for that of p.
    """
    outer, inner, experts = p.shape[1], q.shape[1], plan.offsets.shape[0]
    dw = torch.empty(experts, outer, inner, device=p.device, dtype=dtype or p.dtype)
    stages = min(settings.stages, FLOAT32_STAGES) if dw.dtype == torch.float32 else settings.stages
    p, q = tma_aligned(p), tma_aligned(q)
    p_block, q_block = [PIPELINE_BK, HALF_M.value], [PIPELINE_BK, settings.columns]
    launch(
        *(weights_module.weight_gradient_kernel, (multiprocessors(),)),
        *(_desc(p, p_block), _desc(q, q_block), ragged_desc(p, p_block), ragged_desc(q, q_block)),
        describe(dw.view(-1, inner), _HALF),
        *(plan.offsets, experts * _tiles(outer, inner, settings), outer, inner),
        GROUP_M=GROUP_M,
        STAGES=stages,
        num_warps=4,
    )
    return dw


def launch_gathered_weights(
    tokens: Tensor, rows: Tensor, plan: Plan, settings: PipelineConfig, *, transposed: bool
) -> Tensor:
    """Return (E, D, R): tokens[token]^T @ rows over each expert's rows, for (T, D) and (N, R).

    transposed: return (E, R, D) instead.
    """
    dim, width, experts = tokens.shape[1], rows.shape[1], plan.offsets.shape[0]
    shape = (experts, width, dim) if transposed else (experts, dim, width)
    dw = torch.empty(shape, device=rows.device, dtype=rows.dtype)
    rows, block = tma_aligned(rows), [PIPELINE_BK, settings.columns]
    launch(
        *(tokens_module.gathered_weight_gradient_kernel, (multiprocessors(),)),
        *(tma_aligned(tokens), plan.token, _desc(rows, block), ragged_desc(rows, block)),
        describe(dw.view(-1, shape[2]), _HALF[::-1] if transposed else _HALF),
        *(plan.offsets, experts * _tiles(dim, width, settings), dim, width),
        GROUP_M=GROUP_M,
        STAGES=settings.stages,
        TRANSPOSED=transposed,
        num_warps=4,
    )
    return dw


def launch_columns(
    a: Tensor, weight: Tensor, plan: Plan, stages: int = COLUMNS.stages, *, gated: bool
) -> Tensor:
    """Return the result of `launch_up` if gated, else that of `launch_rows`, (N, outer).

    gated: a holds tokens (T, D), and weight is (E, 2 outer, D); else rows (N, I) and (E, outer, I).
    """
    outer = weight.shape[1] // 2 if gated else weight.shape[1]
    out = torch.empty(plan.num_rows, outer, device=a.device, dtype=a.dtype)
    num_k, step = a.shape[1] // PIPELINE_BK, (1 if gated else 2) * _WEIGHT_BLOCK[0]
    if gated:
        tokens = (tma_aligned(a), plan.token, None, None)
    else:
        tokens = (None, None, _desc(a, _PART), _desc(a, _EXTRA))
    expert, start = plan[TILE_ROWS]
    launch(
        *(columns_module.columns_kernel, (multiprocessors(),)),
        *(*tokens, _desc(weight, _WEIGHT_BLOCK), out),
        *(expert, start, plan.offsets, plan.num_used(TILE_ROWS), plan.counter),
        *(cdiv(outer, step), num_k, _asks_at(num_k), outer),
        GATED=gated,
        GROUP_M=GROUP_M,
        BY_EXPERT=plan.by_expert(TILE_ROWS, weight),
        STAGES=stages,
        num_warps=4,
    )
    return out
