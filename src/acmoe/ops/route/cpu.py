"""The router on a CPU for few tokens without gradients: the definition, in fewer calls.

A call of torch on a few numbers takes 5 to 20 us in a layer, which is longer than its arithmetic.
The definition sorts all affinities, because `torch.topk` leaves the order of equal ones open. This
kernel calls `torch.topk`, and the definition only if the host finds that affinities are equal. Its
results have the bits of the definition. docs/performance/cpu.md has the times.

T tokens, D features, E experts, K experts per token.
"""

import itertools

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.bounded import sums_are_bounded
from acmoe.ops.dispatch import eager
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.route.reference import Route, check_route, gate_sum, load, route
from acmoe.ops.route.tokens import ScaledTokens
from acmoe.ops.softmax import FEW_ROWS

FEW = 2048  # affinities up to which the host compares them in less time than it saves
_MANY = f"it serves fewer than {FEW_ROWS} tokens and up to {FEW:,} affinities"


def unsupported(
    tokens: ScaledTokens,
    embedding: Tensor,
    bias: Tensor | None,
    top_k: int,
    token_mask: Tensor | None,
    noise: Tensor | None,
) -> str | None:
    """Return the reason why the kernel cannot serve this call, or None."""
    x, scale_CD = tokens.x, tokens.scale
    if x.device.type != "cpu":
        return "it is for CPUs"
    # This check comes before any size is read: a branch on a size would bind a traced graph to few
    # tokens, or to many.
    if not eager(x, embedding, bias, scale_CD, tokens.assignment):
        return "it is traced"
    num_tokens = x.numel() // embedding.shape[1]
    if not 0 < num_tokens < FEW_ROWS or num_tokens * embedding.shape[0] > FEW:
        return _MANY
    if top_k == 1:
        return "the definition takes as long for one expert per token"
    if token_mask is not None or noise is not None or tokens.product is not None:
        return "it takes tokens without mask, noise and product"
    if x.dtype not in (torch.float32, torch.float64):
        return "it takes float32 and float64"
    if embedding.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return "it takes tokens and weights of one dtype"
    if torch.is_autocast_enabled("cpu"):
        return "under autocast its product would be narrow"
    return "it has no gradient" if records_gradient(x, embedding, bias, scale_CD) else None


def route_few_tokens(
    tokens: ScaledTokens,
    embedding: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    over_selected: bool,
    token_mask: None = None,
    temperature: float | None = None,
    noise: None = None,
    balance_weight: float | None = None,
) -> Route:
    """Compute the op `route`. `unsupported` has refused mask and noise.

    As in the definition, `balance_weight` changes nothing: `gate_sum` and `load` are returned.
    """
    check_route(tokens, embedding, top_k, token_mask, noise)
    clean_TE = F.linear(_rows(tokens), embedding, bias)
    best_TK, expert_ids_TK = clean_TE.topk(top_k)
    if not _in_order(clean_TE, best_TK):
        return route.definition(
            *(tokens, embedding, bias),
            top_k=top_k,
            over_selected=over_selected,
            temperature=temperature,
        )
    if over_selected:
        gate_TK = best_TK.softmax(-1)
    else:
        gate_TK = clean_TE.softmax(-1).gather(1, expert_ids_TK)
    # A copy, as in the definition; numpy copies in a third of torch's time.
    first_T = torch.from_numpy(expert_ids_TK.numpy()[:, 0].copy())
    if temperature is None:
        return Route(expert_ids_TK, gate_TK, clean_TE, clean_TE, first_T, tokens.x)
    sums_E = gate_sum(clean_TE, temperature, None)
    load_E = load(expert_ids_TK, clean_TE.shape[1]).to(clean_TE.dtype)
    return Route(expert_ids_TK, gate_TK, clean_TE, clean_TE, first_T, tokens.x, sums_E, load_E)


def _rows(tokens: ScaledTokens) -> Tensor:
    """Return (T, D): `tokens.dense()`. The call is not traced, so the host may read values."""
    x = tokens.x
    if tokens.scale is not None or not sums_are_bounded(x):
        x = tokens.dense()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _in_order(value_TE: Tensor, best_TK: Tensor) -> bool:
    """Return True if the K best values of each row are larger than each other and than the rest.

    torch leaves the order of equal values open. It ranks NaN first, which equals no number here.
    """
    T, K = best_TK.shape
    if T == 1:  # numpy takes longer to begin than Python to compare one row
        (row,), (best,) = value_TE.tolist(), best_TK.tolist()
        number = sum([one >= best[-1] for one in row])
        return number == K and all([one > other for one, other in itertools.pairwise(best)])
    value, best = value_TE.numpy(), best_TK.numpy()
    if np.count_nonzero(value >= best[:, -1:]) != T * K:
        return False
    return bool(np.count_nonzero(best[:, :-1] > best[:, 1:]) == T * (K - 1))
