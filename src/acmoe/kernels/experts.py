"""Launches of the expert kernels: block sizes, grids, buffers.

T tokens, K experts per token, N = T * K rows, D features, F hidden units, E experts, W = F or 2F.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from acmoe.kernels.expert_backward import activation_kernel, weight_kernel
from acmoe.kernels.expert_forward import combine_kernel, copy_kernel, rows_kernel, up_kernel
from acmoe.kernels.tiles import tile_table
from acmoe.kernels.tuning import Blocks, blocks_for, copies_rows

_GROUP = 8  # row tiles that walk over the columns together


class Sizes(NamedTuple):
    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    act: str

    @property
    def width(self) -> int:
        return 2 * self.hidden if self.act == "swiglu" else self.hidden


def sizes_of(x: Tensor, down: Tensor, gate: Tensor, act: str) -> Sizes:
    return Sizes(x.shape[0], x.shape[1], down.shape[2], down.shape[0], gate.shape[1], act)


class Plan:
    """Where each sorted row comes from, and the tiles of each height asked for."""

    def __init__(self, order_N: Tensor, end_E: Tensor, top_k: int) -> None:
        self.order, self.end, self.num_rows = order_N, end_E, order_N.numel()
        # Divided here once: in the inner loop of a kernel the division costs more than the load.
        self.token = torch.div(order_N, top_k, rounding_mode="floor").to(torch.int32)
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, block_m: int) -> tuple[Tensor, Tensor]:
        if block_m not in self.tables:
            self.tables[block_m] = tile_table(self.end, self.num_rows, block_m)
        return self.tables[block_m]


def _blocks(kernel: str, size: Sizes, dtype: torch.dtype) -> Blocks:
    blocks = blocks_for(kernel, size.dim, size.hidden, size.experts, dtype)
    aligned = size.dim * dtype.itemsize % 16 == 0 and size.hidden * dtype.itemsize % 16 == 0
    return blocks if aligned else blocks._replace(tma=False)


def _desc(tensor: Tensor, block: list[int], blocks: Blocks) -> Any:
    """A tensor-map of a matrix, or the tensor itself where the copy engine is not used."""
    if not blocks.tma:
        return tensor
    flat = tensor.reshape(-1, tensor.shape[-1])
    return TensorDescriptor.from_tensor(flat, block)


class Source(NamedTuple):
    """What stands at each routed row: rows (N, D) in sorted order, or tokens (T, D) to gather."""

    values: Tensor
    gather: bool


def source_of(x: Tensor, plan: Plan, size: Sizes) -> Source:
    """Rows where the experts are so wide that the copy pays, else the tokens themselves.

    Every row is some token's. Those for no expert stand last; what a last tile reads of them goes
    nowhere.
    """
    if not copies_rows(size.width):
        return Source(x, True)
    dim = x.shape[1]
    rows = torch.empty(plan.num_rows, dim, device=x.device, dtype=x.dtype)
    block = min(4096, triton.next_power_of_2(dim))
    copy_kernel[(plan.num_rows, triton.cdiv(dim, block))](
        x, plan.token, rows, dim, BD=block, num_warps=4
    )
    return Source(rows, False)


def _launch(blocks: Blocks) -> dict[str, Any]:
    return {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}


def run_up(
    source: Source,
    up: Tensor,
    up_bias: Tensor | None,
    plan: Plan,
    size: Sizes,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """h (N, W) before the activation, and a (N, F) after activation and dropout."""
    x, rows = source.values, plan.num_rows
    h = torch.empty(rows, size.width, device=x.device, dtype=x.dtype)
    a = torch.empty(rows, size.hidden, device=x.device, dtype=x.dtype)
    blocks = _blocks("up", size, x.dtype)
    expert, start = plan[blocks.m]
    num_n = triton.cdiv(size.hidden, blocks.n)
    up_kernel[(expert.numel() * num_n,)](
        *(x, x if source.gather else _desc(x, [blocks.m, blocks.k], blocks)),
        *(up, _desc(up, [blocks.n, blocks.k], blocks)),
        *(up if up_bias is None else up_bias, h, a, plan.token, expert, start, plan.end, seed),
        *(size.dim, size.hidden, expert.numel(), num_n),
        GROUP=_GROUP,
        GATHER=source.gather,
        ACT=size.act,
        HAS_BIAS=up_bias is not None,
        DROPOUT=dropout,
        EVEN_K=size.dim % blocks.k == 0,
        TMA=blocks.tma,
        BM=blocks.m,
        BN=blocks.n,
        BK=blocks.k,
        **_launch(blocks),
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
    rows_kernel[(expert.numel() * num_n,)](
        *(a, _desc(a, [blocks.m, blocks.k], blocks), weight, _desc(weight, w_block, blocks)),
        *(weight if bias is None else bias, y, plan.token, expert, start, plan.end),
        *(inner, outer, expert.numel(), num_n),
        GROUP=_GROUP,
        GATHER=gather,
        ACROSS=across,
        HAS_BIAS=bias is not None,
        EVEN_K=inner % blocks.k == 0,
        TMA=blocks.tma,
        BM=blocks.m,
        BN=blocks.n,
        BK=blocks.k,
        **_launch(blocks),
    )
    return y


def run_combine(y: Tensor, gate: Tensor | None, back: Tensor, end: Tensor, tokens: int) -> Tensor:
    """(T, D): each token's rows, weighted by the gate or plainly summed."""
    dim = y.shape[1]
    out = torch.empty(tokens, dim, device=y.device, dtype=y.dtype)
    block = min(1024, triton.next_power_of_2(dim))
    combine_kernel[(tokens, triton.cdiv(dim, block))](
        *(y, y if gate is None else gate, back, out, end[-1:], dim, back.numel() // tokens),
        HAS_GATE=gate is not None,
        BD=block,
        num_warps=4 if block >= 512 else 2,
    )
    return out


def run_activation(
    da: Tensor,
    h: Tensor,
    gate: Tensor,
    by_bias: Tensor | None,
    expert_N: Tensor,
    plan: Plan,
    size: Sizes,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dh (N, W), written over h; gate * a (N, F), over da; and the gate's gradient (T, K)."""
    dgate = torch.empty(gate.shape, device=h.device)
    block = min(1024, triton.next_power_of_2(size.hidden))
    activation_kernel[(plan.num_rows,)](
        *(da, h, gate, gate if by_bias is None else by_bias, da, dgate),
        *(plan.order, expert_N, plan.end, seed, size.hidden, size.experts, size.top_k),
        ACT=size.act,
        HAS_BIAS=by_bias is not None,
        DROPOUT=dropout,
        BF=block,
        num_warps=4 if block >= 512 else 2,
    )
    return h, da, dgate


def run_weight(
    kernel: str,
    p: Tensor,
    q: Tensor,
    gate: Tensor,
    plan: Plan,
    size: Sizes,
    *,
    gather: str,
    bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """(E, O, I) sums of outer products p^T q over each expert's rows, and (E, O) sums of p.

    gather: "p" or "q" for the one that holds tokens, "none" where both hold rows.
    """
    outer, inner = p.shape[1], q.shape[1]
    blocks = _blocks(kernel, size, p.dtype)
    tiles = (triton.cdiv(inner, blocks.n), triton.cdiv(outer, blocks.m))
    splits = _splits(tiles[0] * tiles[1] * size.experts, plan.num_rows // size.experts, blocks.k)
    dtype = p.dtype if splits == 1 else torch.float32
    dw = torch.empty(size.experts, splits, outer, inner, device=p.device, dtype=dtype)
    db = torch.empty(size.experts, splits, outer, device=p.device, dtype=dtype) if bias else None
    grid = (tiles[0] * tiles[1], size.experts * splits)
    weight_kernel[grid](
        *(p, _desc(p, [blocks.k, blocks.m], blocks), q, _desc(q, [blocks.k, blocks.n], blocks)),
        *(
            gate,
            dw,
            dw if db is None else db,
            plan.order,
            plan.token,
            plan.end,
            outer,
            inner,
            splits,
        ),
        GROUP=_GROUP,
        GATHER=gather,
        GATED=kernel == "down_weight",
        HAS_BIAS=bias,
        EVEN=outer % blocks.m == 0 and inner % blocks.n == 0,
        TMA=blocks.tma,
        BM=blocks.m,
        BN=blocks.n,
        BK=blocks.k,
        **_launch(blocks),
    )
    if splits == 1:
        return dw[:, 0], None if db is None else db[:, 0]
    return dw.sum(1).to(p.dtype), None if db is None else db.sum(1).to(p.dtype)


def _splits(tiles: int, rows_per_expert: int, block_k: int) -> int:
    """How often to split an expert's rows: two programs a multiprocessor, 8 blocks of rows each."""
    if not torch.cuda.is_available():
        return 2 if rows_per_expert >= 2 * block_k else 1
    processors = torch.cuda.get_device_properties().multi_processor_count
    return max(1, min(8, 2 * processors // tiles, rows_per_expert // (8 * block_k)))
