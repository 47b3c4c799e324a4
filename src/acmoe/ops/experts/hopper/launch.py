"""Launches of the products by a ring of shared memory (ring.py). Imports Gluon: ring_choice.py."""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from acmoe.ops.device.tuning import RING_DEPTH, RING_HEIGHT, Ring
from acmoe.ops.experts.hopper import hidden as ring_hidden
from acmoe.ops.experts.hopper import rows as ring_rows
from acmoe.ops.experts.hopper import tokens as ring_tokens
from acmoe.ops.experts.hopper import weights as ring_weights
from acmoe.ops.experts.triton.launch import GROUP, on_line
from acmoe.ops.experts.triton.tiles import Plan

_SIDE = 64  # rows of half a tile, and columns of a panel


def _out_desc(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def _desc(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return _out_desc(on_line(tensor.reshape(-1, tensor.shape[-1])), block)


def _programs() -> int:
    """One a multiprocessor; where the kernels are emulated two."""
    if not torch.cuda.is_available():
        return 2
    return torch.cuda.get_device_properties().multi_processor_count


def rows_by_ring(a: Tensor, weight: Tensor, plan: Plan, ring: Ring, *, across: bool) -> Tensor:
    """(N, O): rows times their expert's weight, (E, O, I), or (E, I, O) if `across`."""
    inner = a.shape[1]
    outer = weight.shape[2] if across else weight.shape[1]
    y = torch.empty(plan.num_rows, outer, device=a.device, dtype=a.dtype)
    expert, start = plan[RING_HEIGHT]
    w_block = [RING_DEPTH, ring.columns] if across else [ring.columns, RING_DEPTH]
    ring_rows.rows_by_ring[(_programs(),)](
        *(
            _desc(a, [RING_HEIGHT, RING_DEPTH]),
            _desc(weight, w_block),
            _out_desc(y, [_SIDE, 128]),
            y,
        ),
        *(expert, start, plan.end, plan.live(RING_HEIGHT)),
        *(inner // RING_DEPTH, outer // ring.columns, weight.shape[1], outer),
        GROUP=GROUP,
        ACROSS=across,
        STAGES=ring.stages,
        TOGETHER=ring.form == "together",
        LEAD=ring.lead,
        num_warps=4,
    )
    return y


def hidden_by_ring(
    x: Tensor, down: Tensor, h: Tensor, dh: Tensor, gate: Tensor, plan: Plan, ring: Ring
) -> tuple[Tensor, Tensor]:
    """gate * a (N, F), and the rows' shares (B, N) of the gate's gradient; writes dh (N, 2F)."""
    _, dim, hidden = down.shape
    rows = plan.num_rows
    a = torch.empty(rows, hidden, device=h.device, dtype=h.dtype)
    share = torch.empty(hidden // ring.columns, rows, device=h.device)
    expert, start = plan[RING_HEIGHT]
    panel = [_SIDE, _SIDE]
    ring_hidden.hidden_in_turns[(_programs(),)](
        *(_desc(x, [RING_HEIGHT, RING_DEPTH]), _desc(down, [RING_DEPTH, ring.columns])),
        *(
            _desc(h, panel),
            _out_desc(dh, panel),
            _out_desc(a, panel),
            dh,
            a,
            share,
            gate,
            plan.order,
        ),
        *(expert, start, plan.end, plan.live(RING_HEIGHT)),
        *(rows, dim // RING_DEPTH, hidden // ring.columns, dim, hidden),
        GROUP=GROUP,
        STAGES=ring.stages,
        BUFFERS=ring.buffers,
        num_warps=4,
    )
    return a, share


def weights_by_ring(p: Tensor, q: Tensor, plan: Plan, ring: Ring) -> Tensor:
    """(E, O, I) sums of outer products p^T q over each expert's rows; both hold rows."""
    outer, inner, experts = p.shape[1], q.shape[1], plan.end.shape[0]
    dw = torch.empty(experts, outer, inner, device=p.device, dtype=p.dtype)
    p_block, q_block = [RING_DEPTH, _SIDE], [RING_DEPTH, ring.columns]
    ring_weights.weights_together[(_programs(),)](
        *(_desc(p, p_block), _desc(q, q_block), _out_desc(dw.view(-1, inner), [_SIDE, 128])),
        *(p, q, plan.end, experts * (outer // RING_HEIGHT) * (inner // ring.columns)),
        *(outer, inner),
        GROUP=GROUP,
        STAGES=ring.stages,
        num_warps=4,
    )
    return dw


def weights_of_tokens(
    tokens: Tensor, rows: Tensor, plan: Plan, ring: Ring, *, turned: bool
) -> Tensor:
    """(E, D, R) sums of outer products over each expert's rows of tokens (T, D) and rows (N, R);
    `turned` (E, R, D)."""
    dim, width, experts = tokens.shape[1], rows.shape[1], plan.end.shape[0]
    shape = (experts, width, dim) if turned else (experts, dim, width)
    dw = torch.empty(shape, device=rows.device, dtype=rows.dtype)
    rows = on_line(rows)
    ring_tokens.weights_of_tokens[(_programs(),)](
        *(on_line(tokens), plan.token, _desc(rows, [RING_DEPTH, ring.columns]), rows),
        _out_desc(dw.view(-1, shape[2]), [128, _SIDE] if turned else [_SIDE, 128]),
        *(plan.end, experts * (dim // RING_HEIGHT) * (width // ring.columns), dim, width),
        GROUP=GROUP,
        STAGES=ring.stages,
        TURNED=turned,
        num_warps=4,
    )
    return dw
