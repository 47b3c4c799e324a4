"""Expert parallelism: each process holds some experts of every layer, and rows travel to them.

The router of a layer runs where the tokens are, as on one process. Then, in each layer:

1. A process sorts its rows by expert, and tells the others how many rows their experts get.
2. All-to-all: rows travel to the processes of their experts, in any numbers; none is dropped.
3. Each process applies its own experts to the rows of all processes.
4. All-to-all: the outputs travel back, and a token adds up its own, weighted by its gate.

Only `ExpertMLP.forward` is replaced, from outside; the layer around it (experts/moe.py) does not
know. The gradient of an expert is the mean over the processes that share the experts; averaging it
over those that hold the same experts is left to DDP (experts_ddp.py) or FSDP2.

T tokens of this process, K experts per token, N = T * K rows, D features, E experts of a layer, P
processes that share them, X = E / P experts of each, R rows that the experts of this process get.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from acmoe.distributed.whole import is_part
from acmoe.errors import check
from acmoe.experts.mlp import ExpertMLP
from acmoe.experts.moe import MoE
from acmoe.experts.soft import SoftMoE
from acmoe.ops.experts import ExpertWeights, expert_mlp
from acmoe.ops.experts.reference import combine, dispatch
from acmoe.ops.precision import autocast_dtype
from acmoe.ops.sort import Rows, sort_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def distribute_experts(model: nn.Module, mesh: "DeviceMesh") -> None:
    """Keep X experts of every MoE layer on this process, as DTensors on the mesh of P processes.

    All processes must hold the same weights before. Layers whose experts are distributed already
    stay as they are.
    """
    _check_layers(model, mesh.size())
    for layer in model.modules():
        if isinstance(layer, MoE) and not is_part(layer.experts.up):
            _shard(layer.experts, mesh)
            forward = partial(forward_by_exchange, layer.experts, mesh)
            layer.experts.forward = forward  # type: ignore[method-assign]


def distributed_experts(model: nn.Module) -> list[ExpertMLP]:
    """Return the experts that `distribute_experts` has distributed, layer by layer."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    return [layer.experts for layer in layers if "forward" in layer.experts.__dict__]


def _shard(experts: ExpertMLP, mesh: "DeviceMesh") -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, whole in list(experts.named_parameters(recurse=False)):
        # src_data_rank=None: every process has the whole tensor, so nothing is sent.
        part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(part, requires_grad=whole.requires_grad))


def forward_by_exchange(
    experts: ExpertMLP,
    mesh: "DeviceMesh",
    x_TD: Tensor,
    rows: Rows,
    gate_TK: Tensor,
    *,
    complete: bool = False,
) -> Tensor:
    """Compute `ExpertMLP.forward`, with experts on all processes of the mesh.

    All processes must call it, also one that has no row to send, or whose experts get none.
    `complete` is not needed: the host knows the number of rows that have an expert.
    """
    x_TD = x_TD.to(autocast_dtype(x_TD) or x_TD.dtype)
    plan = plan_exchange(rows, mesh)
    rows_ND = dispatch(x_TD, rows)
    sent = sum(plan.sent)
    mine_RD = _all_to_all(rows_ND[:sent], plan.received, plan.sent, mesh)
    y_RD = _own_experts(experts, mine_RD, plan.expert, gate_TK)
    y_ND = _all_to_all(y_RD, plan.sent, plan.received, mesh)
    if sent < len(rows_ND):  # rows without an expert come last, and stay
        y_ND = torch.cat([y_ND, y_ND.new_zeros(len(rows_ND) - sent, y_ND.shape[1])])
    return combine(y_ND, gate_TK, rows)


class Exchange(NamedTuple):
    """The rows of a layer that travel, as this process sees them."""

    sent: list[int]  # rows to each of the P processes
    received: list[int]  # rows from each of the P processes
    expert: Tensor  # (R,) the expert of each received row, counted among those of this process


def plan_exchange(rows: Rows, mesh: "DeviceMesh") -> Exchange:
    """Tell the other processes how many rows each expert gets.

    The host reads the sums here, and waits for the device: all-to-all takes its sizes from there.
    """
    from torch.distributed import _functional_collectives as collectives

    count_E = torch.diff(rows.offsets, prepend=rows.offsets.new_zeros(1))
    arriving_E = _arrived(collectives.all_to_all_single(count_E, None, None, mesh))
    # By process: those that get the rows of count_E, those that send the rows of arriving_E.
    both_2PX = torch.stack([count_E, arriving_E]).view(2, mesh.size(), -1)
    sent, received = both_2PX.sum(-1).tolist()
    ids_X = torch.arange(both_2PX.shape[-1], device=count_E.device).repeat(mesh.size())
    expert_R = ids_X.repeat_interleave(both_2PX[1].flatten(), output_size=sum(received))
    return Exchange(sent, received, expert_R)


def _all_to_all(x_ND: Tensor, received: list[int], sent: list[int], mesh: "DeviceMesh") -> Tensor:
    """Send rows to each process and return those that came; backward sends gradients back."""
    from torch.distributed import _functional_collectives as collectives

    return _arrived(collectives.all_to_all_single_autograd(x_ND, received, sent, mesh))


def _arrived(tensor: Tensor) -> Tensor:
    """Make the device, not the host, wait for the result of a collective."""
    from torch.distributed import _functional_collectives as collectives

    found: Tensor = collectives.wait_tensor(tensor)  # type: ignore[no-untyped-call]
    return found


def _own_experts(experts: ExpertMLP, x_RD: Tensor, expert_R: Tensor, gate_TK: Tensor) -> Tensor:
    """Apply the experts of this process to its rows (R, D); any kernel of the op may serve."""
    up, down, up_bias, down_bias = (
        None if part is None else _local(part)
        for part in (experts.up, experts.down, experts.up_bias, experts.down_bias)
    )
    assert up is not None
    assert down is not None
    return expert_mlp(
        x_RD,
        ExpertWeights(up, down, up_bias, down_bias),
        sort_rows(expert_R[:, None], len(up)),
        gate_TK.new_ones(len(x_RD), 1),  # gates are applied where the tokens are
        activation=experts.activation,
        dropout=experts.dropout if experts.training else 0.0,
        complete=True,
    )


def _local(part: Any) -> Tensor:
    """Return the part of a DTensor that this process holds; its gradient is divided by P.

    A loss is the mean over the tokens of a process, and the rows of P processes come here: the sum
    of their gradients would be that of P losses.
    """
    found: Tensor = _DivideGradient.apply(part.to_local(), part.device_mesh.size())  # type: ignore[no-untyped-call]
    return found


class _DivideGradient(torch.autograd.Function):
    """The identity, whose backward divides by a number."""

    @staticmethod
    def forward(ctx, x, divisor):  # type: ignore[no-untyped-def]
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad / ctx.divisor, None


def _check_layers(model: nn.Module, size: int) -> None:
    modules = list(model.modules())
    check(
        not any(isinstance(module, SoftMoE) for module in modules),
        f"parallel.expert={size} sends tokens to the experts that a router chooses, and SoftMoE "
        "gives every expert a mixture of all tokens; use parallel.expert=1",
    )
    numbers = [module.num_experts for module in modules if isinstance(module, MoE)]
    check(bool(numbers), f"parallel.expert={size}, but the model has no MoE layer; use 1")
    for number in numbers:
        check(
            number % size == 0,
            f"parallel.expert={size} does not divide num_experts={number}; each process holds the "
            "same number of experts",
        )
