"""The experts of a layer in plain PyTorch: gather rows, apply two linear layers, combine.

T tokens, K experts per token, N = T * K routed rows, D features, F hidden units, W = F (or 2F for
swiglu), E experts, I inputs and O outputs of a linear map.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.dispatch import eager, op, transforming
from acmoe.ops.experts.cpu.bags import in_bags, sum_of_choices, sum_of_rows
from acmoe.ops.experts.grouped import adds_bias, grouped_linear
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.once import apply
from acmoe.ops.sort.reference import Rows


class ExpertWeights(NamedTuple):
    """The parameters of all experts of a layer."""

    up: Tensor  # (E, W, D); for swiglu the rows of the gate, then those of up
    down: Tensor  # (E, D, F)
    up_bias: Tensor | None  # (E, W)
    down_bias: Tensor | None  # (E, D)


def swiglu(h: Tensor) -> Tensor:
    """Return silu(gate) * up, where h is [gate, up] along its last dimension."""
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "swiglu": swiglu,
}

GroupedGemm = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows, weights, offsets -> rows


@op
def expert_mlp(
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate: Tensor,
    *,
    activation: str,
    dropout: float = 0.0,
    complete: bool = False,
) -> Tensor:
    """Return (T, D): the sum over a token's experts of gate * down(dropout(activation(up(x)))).

    Args:
        x: (T, D) in the dtype that the GEMMs run in.
        weights: parameters of all experts, in any dtype.
        rows: the routed rows sorted by expert.
        gate: (T, K) combine weights; 0 for a row without an expert.
        activation: relu | gelu | swiglu.
        dropout: share of the hidden units that is dropped.
        complete: the caller guarantees that every row has an expert.
    """
    return expert_mlp_with(grouped_linear, x, weights, rows, gate, activation, dropout)


def expert_mlp_with(
    gemm: GroupedGemm,
    x_TD: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate_TK: Tensor,
    activation: str,
    dropout: float,
) -> Tensor:
    """Compute `expert_mlp` with the given grouped GEMM."""
    return experts_of_rows(gemm, dispatch(x_TD, rows), weights, rows, gate_TK, activation, dropout)


def experts_of_rows(
    gemm: GroupedGemm,
    x_ND: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate_TK: Tensor,
    activation: str,
    dropout: float = 0.0,
) -> Tensor:
    """Compute `expert_mlp` from the result of `dispatch`."""
    h_NF = linear(gemm, x_ND, weights.up, weights.up_bias, rows)
    h_NF = activated(h_NF, activation)
    if dropout > 0:  # with dynamic=True torch.compile has a symbol here, which F.dropout refuses
        h_NF = F.dropout(h_NF, dropout)
    return combine(linear(gemm, h_NF, weights.down, weights.down_bias, rows), gate_TK, rows)


def activated(h_NW: Tensor, activation: str) -> Tensor:
    """Return the (N, F) activation of h, which the caller does not read again.

    On a CPU relu overwrites h: new memory would take longer than the activation. The backward reads
    the result. Under a dispatch mode h stays as it is, because the mode may keep h for later
    (selective checkpointing).
    """
    if activation == "relu" and h_NW.device.type == "cpu" and eager(h_NW):
        return F.relu_(h_NW)
    return ACTIVATIONS[activation](h_NW)


def linear(
    gemm: GroupedGemm, x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, rows: Rows
) -> Tensor:
    """Return (N, O): each row times the weight of its expert, plus its expert's bias."""
    weight_EOI = weight_EOI.to(x_NI.dtype)  # under autocast tokens are bf16 and weights float32
    if bias_EO is not None and gemm is grouped_linear and adds_bias(x_NI, weight_EOI, bias_EO):
        return grouped_linear(x_NI, weight_EOI, rows.offsets, bias_EO)
    y_NO = gemm(x_NI, weight_EOI, rows.offsets)
    if bias_EO is None:
        return y_NO
    # A one-hot GEMM instead of bias[expert]: its backward sums rows in a fixed order, where the
    # backward of indexing uses atomics. A row without an expert is one-hot to nothing: no bias.
    ids_E = torch.arange(bias_EO.shape[0], device=x_NI.device)
    one_hot_NE = (rows.expert[:, None] == ids_E).to(y_NO.dtype)
    return torch.addmm(y_NO, one_hot_NE, bias_EO.to(y_NO.dtype))


def dispatch(x_TD: Tensor, rows: Rows) -> Tensor:
    """Return (N, D): each token's row, repeated for each of its experts and sorted by expert."""
    top_k = max(rows.permutation.numel() // max(x_TD.shape[0], 1), 1)
    if transforming():
        return x_TD[rows.permutation // top_k]
    if not records_gradient(x_TD):
        return x_TD.index_select(0, tokens_of(rows.permutation, top_k))
    found: Tensor = apply(_Dispatch, x_TD, rows.permutation, rows.inverse)
    return found


def combine(y_ND: Tensor, gate_TK: Tensor, rows: Rows) -> Tensor:
    """Return (T, D): the gate-weighted sum of each token's K expert outputs, first choice first."""
    gate_TK = gate_TK.to(y_ND.dtype)
    if not in_bags(y_ND):
        y_TKD = permute(y_ND, rows.inverse, rows.permutation).view(*gate_TK.shape, y_ND.shape[-1])
        return (y_TKD * gate_TK[..., None]).sum(1)
    if not records_gradient(y_ND, gate_TK):
        return sum_of_choices(y_ND, rows.inverse, gate_TK)
    found: Tensor = apply(_Combine, y_ND, gate_TK, rows.permutation, rows.inverse)
    return found


def tokens_of(permutation_N: Tensor, top_k: int) -> Tensor:
    """Return (N,) permutation // K. A shift takes a quarter of the time of torch's division."""
    if not isinstance(top_k, int) or top_k & (top_k - 1):  # torch.jit.trace makes it a tensor
        return permutation_N // top_k
    return permutation_N if top_k == 1 else permutation_N >> (top_k.bit_length() - 1)


def permute(y_ND: Tensor, index_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Return y[index] for a permutation `index` with the given inverse."""
    if transforming():
        return y_ND[index_N]
    if not records_gradient(y_ND):
        return y_ND.index_select(0, index_N)
    found: Tensor = apply(_Permute, y_ND, index_N, inverse_N)
    return found


# Both save their context in `forward`: with a `setup_context` of their own, every call would take
# the signature of `forward` apart, for 100 us on two ARM cores.
class _Dispatch(torch.autograd.Function):
    """Compute x[permutation // K]; backward gathers and sums over K instead of using atomics."""

    @staticmethod
    def forward(ctx, x_TD, permutation_N, inverse_N):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse_N)
        ctx.num_tokens = x_TD.shape[0]
        top_k = permutation_N.numel() // max(x_TD.shape[0], 1)
        return x_TD.index_select(0, tokens_of(permutation_N, max(top_k, 1)))

    @staticmethod
    def backward(ctx, grad_ND):  # type: ignore[no-untyped-def]
        (inverse_N,) = ctx.saved_tensors
        if ctx.num_tokens == 0:
            return grad_ND.new_zeros(0, grad_ND.shape[-1]), None, None
        if in_bags(grad_ND) and not torch.is_grad_enabled():
            top_k = inverse_N.numel() // ctx.num_tokens
            return sum_of_rows(grad_ND, inverse_N, top_k), None, None
        grad_ND = grad_ND.index_select(0, inverse_N)
        return grad_ND.view(ctx.num_tokens, -1, grad_ND.shape[-1]).sum(1), None, None


class _Permute(torch.autograd.Function):
    """Compute y[index] for a permutation `index`; backward gathers with the inverse permutation."""

    @staticmethod
    def forward(ctx, y_ND, index_N, inverse_N):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse_N)
        return y_ND.index_select(0, index_N)

    @staticmethod
    def backward(ctx, grad_ND):  # type: ignore[no-untyped-def]
        (inverse_N,) = ctx.saved_tensors
        return grad_ND.index_select(0, inverse_N), None, None


class _Combine(torch.autograd.Function):
    """Compute `combine` on a CPU. The gradients are computed in the order of the sorted rows."""

    @staticmethod
    def forward(ctx, y_ND, gate_TK, permutation_N, inverse_N):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(y_ND, gate_TK, permutation_N, inverse_N)
        return sum_of_choices(y_ND, inverse_N, gate_TK)

    @staticmethod
    def backward(ctx, grad_TD):  # type: ignore[no-untyped-def]
        y_ND, gate_TK, permutation_N, inverse_N = ctx.saved_tensors
        grad_ND = grad_TD.index_select(0, tokens_of(permutation_N, gate_TK.shape[1]))
        grad_y = grad_gate = None
        if ctx.needs_input_grad[1]:
            grad_gate = (grad_ND * y_ND).sum(-1).index_select(0, inverse_N).view(gate_TK.shape)
        if ctx.needs_input_grad[0]:
            gate_N1 = gate_TK.reshape(-1).index_select(0, permutation_N)[:, None]
            # In place, unless this backward is recorded for a second derivative.
            grad_y = grad_ND * gate_N1 if torch.is_grad_enabled() else grad_ND.mul_(gate_N1)
        return grad_y, grad_gate, None, None
