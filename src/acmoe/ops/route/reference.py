"""The top-k router in plain PyTorch: affinity, choice, gate, and the sums of the balance loss.

T tokens, D features, E experts, K experts per token.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.errors import UserError
from acmoe.ops.checks import host_may_read
from acmoe.ops.dispatch import op
from acmoe.ops.route.tokens import ScaledTokens
from acmoe.ops.softmax import row_softmax

_FEW = 512  # numbers per choice up to which `best_first` sorts on a CPU


class Route(NamedTuple):
    """The decision of a top-k router, and the sums that its balance loss is computed from."""

    expert_ids: Tensor  # (T, K) int64, highest affinity first, lowest index among equals
    gate: Tensor  # (T, K) softmax over the chosen affinities, or softmax over all E at the chosen
    affinity: Tensor  # (T, E) the affinities that were ranked, noise included
    clean: Tensor  # (T, E) the affinities without noise
    first: Tensor  # (T,) int64 expert of highest affinity, the first column of `expert_ids`
    # (..., D) the input tokens, unscaled. Layers after the router should read them from here: a
    # kernel's backward then adds their gradient to the router's without another launch.
    x: Tensor
    gate_sum: Tensor | None = None  # (E,) sum of softmax(clean / temperature) over unmasked tokens
    load: Tensor | None = None  # (E,) float32 number of unmasked tokens that chose each expert
    # () the balance loss of the two, E * sum_e load_e / sum(load) * gate_sum_e / T, times its
    # weight, where a kernel computed it instead of them
    balance: Tensor | None = None


@op
def route(
    tokens: ScaledTokens,
    embedding: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    over_selected: bool,
    token_mask: Tensor | None = None,
    temperature: float | None = None,
    noise: Tensor | None = None,
    balance_weight: float | None = None,
) -> Route:
    """Choose the k experts of highest affinity (M x) . e_k + b_k + noise for every token.

    Args:
        tokens: T tokens, masked ones zero.
        embedding: (E, D) expert embeddings.
        bias: (E,) or None.
        top_k: experts per token.
        over_selected: True for a softmax over the chosen k (Eqn. 2), False for one over all E.
        token_mask: (T,) False for padding, which is left out of `gate_sum` and `load`.
        temperature: softmax temperature of the balance loss; None: no `gate_sum` and no `load`.
        noise: (T, E) constant, added to the affinities before the top-k.
        balance_weight: `gate_sum` and `load` are wanted for the balance loss with this weight
            alone; a kernel may return `balance` in their place. None: they are wanted. With a
            weight of 0 and without a temperature, a kernel may return a `balance` of 0.
    """
    check_route(tokens, embedding, top_k, token_mask, noise)
    x_TD = tokens.dense().reshape(-1, embedding.shape[1])
    clean_TE = linear_affinity(x_TD, embedding, bias)
    found = choose(
        clean_TE,
        top_k=top_k,
        over_selected=over_selected,
        token_mask=token_mask,
        temperature=temperature,
        noise=noise,
    )
    return found._replace(x=tokens.x)


def linear_affinity(x: Tensor, embedding: Tensor, bias: Tensor | None) -> Tensor:
    """Return (T, E): x . e_k + b_k for tokens x (T, D), in the dtype of x."""
    return F.linear(x, embedding.to(x.dtype), None if bias is None else bias.to(x.dtype))


def choose(
    clean_TE: Tensor,
    *,
    top_k: int,
    over_selected: bool,
    token_mask: Tensor | None = None,
    temperature: float | None = None,
    noise: Tensor | None = None,
) -> Route:
    """Compute `route` from given affinities; the caller must replace x in the result."""
    affinity_TE = clean_TE if noise is None else clean_TE + noise
    expert_ids_TK = best_first(affinity_TE, top_k)
    if over_selected:
        # Contiguous: experts' outputs take half as long again to multiply by a transposed gate.
        gate_TK = row_softmax(affinity_TE.gather(1, expert_ids_TK)).contiguous()
    else:
        gate_TK = row_softmax(affinity_TE).gather(1, expert_ids_TK)
    # A copy, as a kernel returns it: the first choice outlives the ids in the routing state.
    first_T = expert_ids_TK[:, 0].clone()
    found = Route(expert_ids_TK, gate_TK, affinity_TE, clean_TE, first_T, clean_TE)
    if temperature is None:
        return found
    return found._replace(
        gate_sum=gate_sum(clean_TE, temperature, token_mask),
        load=load(expert_ids_TK, clean_TE.shape[1], token_mask).to(clean_TE.dtype),
    )


def best_first(value_TE: Tensor, top_k: int) -> Tensor:
    """Return (T, K) int64: the columns of each row's K largest values, largest first.

    Equal values come in the order of their columns; `torch.topk` leaves this order open, so that
    backends would send a token with equal affinities to different experts. -0.0 equals 0.0, NaN is
    larger than every number. Every column is returned once, whatever the row holds.
    """
    value_TE = value_TE.detach()
    E = value_TE.shape[-1]
    # On a CPU sorting a few numbers takes less than the calls of the other form. A graph must not
    # depend on the number of tokens.
    few = top_k > 1 and value_TE.device.type == "cpu" and not torch.compiler.is_compiling()
    few = few and value_TE.numel() <= _FEW * top_k
    if few or top_k > min(16, max(4, E // 8)) or not value_TE.is_floating_point():
        order_TE = value_TE.sort(dim=-1, descending=True, stable=True).indices
        return order_TE[..., :top_k].contiguous()
    if top_k == 1:
        return value_TE.max(dim=-1, keepdim=True).indices  # the first of equal values
    # A copy, in which -inf marks columns already taken. The clamp makes other -inf the lowest
    # finite number.
    value_TE = value_TE.clamp(min=torch.finfo(value_TE.dtype).min)
    columns = [value_TE.max(dim=-1, keepdim=True).indices]
    for _ in range(top_k - 1):
        value_TE.scatter_(-1, columns[-1], float("-inf"))
        columns.append(value_TE.max(dim=-1, keepdim=True).indices)
    return torch.cat(columns, dim=-1)


def first_chosen(affinity_TE: Tensor, expert_ids_TK: Tensor) -> Tensor:
    """Return (T,) int64 k*: each token's expert of highest affinity among those chosen for it.

    The lowest expert wins a tie. The id E in `expert_ids_TK` means "no expert"; a
    token with no expert at all has the expert of highest affinity.
    """
    affinity_TE = affinity_TE.detach()
    E = affinity_TE.shape[-1]
    none_TK = expert_ids_TK >= E
    value_TK = affinity_TE.gather(-1, expert_ids_TK.clamp(max=E - 1))
    value_TK = value_TK.masked_fill(none_TK, float("-inf"))
    # "less than" instead of "unequal": NaN is not less than NaN, and its expert stays a candidate.
    lower_TK = value_TK < value_TK.amax(-1, keepdim=True)
    first_T = expert_ids_TK.masked_fill(lower_TK | none_TK, E).amin(-1)
    return torch.where(first_T < E, first_T, affinity_TE.argmax(-1))


def gate_sum(affinity_TE: Tensor, temperature: float, token_mask_T: Tensor | None) -> Tensor:
    """Return (E,): softmax(affinity / temperature), summed over the unmasked tokens."""
    # The paper's temperature is 1: dividing by it would copy the affinities, forward and backward.
    gate_TE = row_softmax(affinity_TE if temperature == 1 else affinity_TE / temperature)
    if token_mask_T is not None:
        gate_TE = gate_TE.masked_fill(~token_mask_T[:, None], 0.0)
    return gate_TE.sum(0)


def load(expert_ids_TK: Tensor, num_experts: int, token_mask_T: Tensor | None = None) -> Tensor:
    """Return (E,) float32: rows routed to each expert. The id E ("no expert") is not counted.

    Sums of ones are exact in float32 up to 2^24 rows, so the order of additions does not matter.
    """
    count_E = _count(expert_ids_TK, num_experts) if token_mask_T is None else None
    if count_E is not None:
        return count_E
    ones_TK = torch.ones_like(expert_ids_TK, dtype=torch.float32)
    if token_mask_T is not None:
        ones_TK = ones_TK * token_mask_T[:, None]
    total = ones_TK.new_zeros(num_experts + 1)
    return total.index_add(0, expert_ids_TK.flatten(), ones_TK.flatten())[:num_experts]


def _count(expert_ids_TK: Tensor, num_experts: int) -> Tensor | None:
    """Return `load` of rows that the host may read, in one call of numpy; None: it cannot."""
    if not host_may_read(expert_ids_TK):
        return None
    try:
        count = np.bincount(expert_ids_TK.numpy().reshape(-1), minlength=num_experts + 1)
    except (ValueError, MemoryError):  # an id below 0, or a huge one; torch refuses both, too
        return None
    if len(count) > num_experts + 1:  # an id above E
        return None
    return torch.from_numpy(count[:num_experts].astype(np.float32))


def check_route(
    tokens: ScaledTokens,
    embedding: Tensor,
    top_k: int,
    token_mask: Tensor | None,
    noise: Tensor | None,
) -> None:
    """Raise a UserError unless the shapes of the arguments fit each other."""
    x = tokens.x
    T, (E, D) = x.numel() // x.shape[-1], embedding.shape
    if embedding.device != x.device:
        raise UserError(
            f"x is on {x.device} and the router's weight on {embedding.device}; move the layer to "
            "the device of x, or let the hook that offloads weights load them"
        )
    if x.shape[-1] != D:
        raise UserError(
            f"x has shape {tuple(x.shape)} and embedding {tuple(embedding.shape)}; pass (tokens, "
            "features) and (experts, features)"
        )
    if not 1 <= top_k <= E:
        raise UserError(f"top_k={top_k}; it must lie between 1 and the {E} experts")
    for name, given, shape in (("token_mask", token_mask, (T,)), ("noise", noise, (T, E))):
        if given is not None and given.shape != shape:
            raise UserError(
                f"{name} has shape {tuple(given.shape)}; {T} tokens and {E} experts need {shape}"
            )
    if (tokens.scale is None) != (tokens.assignment is None):
        missing = "scale" if tokens.scale is None else "assignment"
        raise UserError(f"scale and assignment come together or not at all; {missing} is None")
    if tokens.scale is None or tokens.assignment is None:
        return
    if tokens.assignment.shape != (T,) or tokens.scale.shape[1:] != (D,):
        raise UserError(
            f"assignment {tuple(tokens.assignment.shape)} and scale {tuple(tokens.scale.shape)} do "
            f"not fit x {tuple(x.shape)}; pass ({T},) and (clusters, {D})"
        )
