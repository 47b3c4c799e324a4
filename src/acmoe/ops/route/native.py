"""The router in C for small calls on a CPU: affinities, choice, gates and balance loss in one pass.

A rescaled token x * scale[cluster] stays in the core's cache, so that an adaptive router costs
little more than a plain one. The backward is one pass, too. Where it is traced, batched or
differentiated, plain PyTorch computes it instead.

T tokens, D features, E experts, C clusters, K experts per token.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from acmoe.ops.dispatch import eager
from acmoe.ops.grad_mode import is_batched, records_gradient
from acmoe.ops.native.library import (
    SERVED,
    functions,
    pointer,
    unsupported_ids,
    unsupported_size,
)
from acmoe.ops.native.library import unsupported as not_native
from acmoe.ops.once import apply, as_saved
from acmoe.ops.route.reference import Route, check_route, route
from acmoe.ops.route.rescaled import rows_of
from acmoe.ops.route.tokens import ScaledTokens

# One thread takes less time than torch's calls up to these numbers of products T * E * D, without
# gradients and with them, and up to this number of weights E * D: it packs them in each call.
MOST, MOST_WITH_GRADIENT, MOST_WEIGHTS = 2**21, 2**20, 2**15


class Settings(NamedTuple):
    """Arguments of `route` that are no tensors."""

    top_k: int
    over_selected: bool
    temperature: float | None
    balance_weight: float | None

    @property
    def numbers(self) -> tuple[bool, float, float]:
        """The arguments `over_selected`, `temperature` and `weight` of the C functions."""
        weight = float(self.balance_weight or 0.0)
        return bool(self.over_selected), float(self.temperature or 1.0), weight


def unsupported(
    tokens: ScaledTokens,
    embedding: Tensor,
    bias: Tensor | None,
    token_mask: Tensor | None,
    noise: Tensor | None,
) -> str | None:
    """Return the reason why the kernel cannot serve this call, or None."""
    x, scale_CD, cluster_T = tokens.x, tokens.scale, tokens.assignment
    reason = not_native(x, embedding, bias, scale_CD)
    if tokens.product is not None and reason is None:
        # x is checked as well: the base router alone must get the same kernel as the adaptive one.
        x, reason = tokens.product, not_native(tokens.product)
    if reason is not None:
        return reason
    if token_mask is not None or noise is not None:
        return "it takes tokens without mask and noise"
    if records_gradient(scale_CD):
        return "it has no gradient for the scale"
    reason = unsupported_ids(cluster_T)
    if reason is not None:
        return reason
    if bias is not None and bias.shape != embedding.shape[:1]:
        return "it takes one bias for each expert"
    most = MOST
    if records_gradient(x, embedding, bias):
        most = MOST_WITH_GRADIENT
        read = (x, embedding, scale_CD, cluster_T)
        if any([one is not None and one.is_inference() for one in read]):
            return "its backward would read tensors of the inference mode"
    if embedding.numel() > MOST_WEIGHTS:
        return f"it takes up to {MOST_WEIGHTS:,} weights"
    return unsupported_size(x.numel() * embedding.shape[0], most, "products")


def route_in_c(
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
    """Compute the op `route`, with `balance` where a weight is given. `unsupported` has refused
    mask and noise.
    """
    check_route(tokens, embedding, top_k, token_mask, noise)
    settings = Settings(top_k, over_selected, temperature, balance_weight)
    if tokens.product is not None:  # layers after the router read the tokens before they are scaled
        found = _routed(ScaledTokens(tokens.product), embedding, bias, settings)
        return found._replace(x=tokens.x)
    return _routed(tokens, embedding, bias, settings)


def _routed(
    tokens: ScaledTokens, embedding: Tensor, bias: Tensor | None, settings: Settings
) -> Route:
    found = _forward(tokens, embedding, bias, settings)
    if found is None:  # huge tokens, NaN, or a cluster that does not exist
        return _definition(tokens, embedding, bias, settings)
    if records_gradient(tokens.x, embedding, bias):
        learned = tokens.x, embedding, bias
        gate, affinity, sums, balance, x = apply(_Router, *learned, tokens, settings, found)
        rest = found.first, tokens.x if x is None else x, sums, found.load, balance
        found = Route(found.expert_ids, gate, affinity, affinity, *rest)
    return found if found.balance is None else found._replace(gate_sum=None, load=None)


def _definition(tokens: ScaledTokens, embedding: Any, bias: Any, settings: Settings) -> Route:
    return route.definition(
        *(tokens, embedding, bias),
        top_k=settings.top_k,
        over_selected=settings.over_selected,
        temperature=settings.temperature,
    )


def _forward(
    tokens: ScaledTokens, embedding: Tensor, bias: Tensor | None, settings: Settings
) -> Route | None:
    """Return the results, without gradients; None if the C function does not serve the call."""
    x, scale_CD, cluster_T = tokens.x, tokens.scale, tokens.assignment
    (E, D), K = embedding.shape, settings.top_k
    T = x.numel() // D
    affinity_TE, gate_TK = x.new_empty(T, E), x.new_empty(T, K)
    ids_TK, first_T = x.new_empty(T, K, dtype=torch.int64), x.new_empty(T, dtype=torch.int64)
    sums_E = load_E = balance = None
    if settings.temperature is not None:
        sums_E, load_E = x.new_empty(E), x.new_empty(E)
        if settings.balance_weight is not None:
            balance = x.new_empty(())
    code = functions().route(
        *(x.data_ptr(), pointer(scale_CD), pointer(cluster_T), embedding.data_ptr()),
        *(pointer(bias), T, D, E, 0 if scale_CD is None else scale_CD.shape[0], K),
        *(*settings.numbers, affinity_TE.data_ptr(), ids_TK.data_ptr(), gate_TK.data_ptr()),
        *(first_T.data_ptr(), pointer(sums_E), pointer(load_E), pointer(balance)),
    )
    if code != SERVED:
        return None
    rest = first_T, x, sums_E, load_E, balance
    return Route(ids_TK, gate_TK, affinity_TE, affinity_TE, *rest)


class _Router(torch.autograd.Function):
    """Give the results of the C function a gradient: gates, affinities, gate sum, balance loss, x.

    Either the gate sum or the balance loss is None, whichever the call does not compute. Layers
    after the router read the returned x, so that the backward adds their gradient in its own pass.
    The returned x is None if x has no gradient. It is also None if no embedding is trained: the
    backward then does not read x, which may therefore change in place.
    """

    @staticmethod
    def forward(ctx, x, embedding, bias, tokens, settings, found):  # type: ignore[no-untyped-def]
        needs_x, needs_embedding, _ = ctx.needs_input_grad[:3]
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            x if needs_embedding else None,
            embedding if needs_x else None,
            *(tokens.scale, tokens.assignment),
            *(found.expert_ids, found.gate, found.affinity, found.load),
        )
        ctx.shape = x.shape
        sums = found.gate_sum if found.balance is None else None
        passed = x if needs_x and needs_embedding else None
        return found.gate, found.affinity, sums, found.balance, passed

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        saved = Saved(*as_saved(ctx.saved_tensors))
        plain = eager(*saved, *grads) and not torch.is_grad_enabled()
        # C cannot read a gradient of a batch (`is_grads_batched`): it has no memory of its own.
        batched = any([grad is not None and is_batched(grad) for grad in grads])
        run = _backward if plain and not batched else _in_torch
        return *run(saved, ctx.shape, ctx.settings, ctx.needs_input_grad, grads), *[None] * 3


class Saved(NamedTuple):
    """The tensors that the backward reads.

    x is None if no embedding is trained, and the embedding is None if x has no gradient.
    """

    x: Tensor | None
    embedding: Tensor | None
    scale: Tensor | None
    cluster: Tensor | None
    expert_ids: Tensor
    gate: Tensor
    affinity: Tensor
    load: Tensor | None


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _backward(
    saved: Saved,
    shape: torch.Size,
    settings: Settings,
    needed: tuple[bool, ...],
    grads: tuple[Tensor | None, ...],
) -> Gradients:
    """Return the gradients of x, the embedding and the bias, None if not needed; x has `shape`."""
    x, embedding, scale_CD, cluster_T, ids_TK, gate_TK, affinity_TE, load_E = saved
    of_gate, of_affinity, of_sum, of_balance, of_x = [
        one if one is None else one.resolve_neg().contiguous() for one in grads
    ]
    (T, E), K, D = affinity_TE.shape, settings.top_k, shape[-1]
    grad_x = affinity_TE.new_empty(shape) if needed[0] else None
    grad_embedding = affinity_TE.new_empty(E, D) if needed[1] else None
    grad_bias = affinity_TE.new_empty(E) if needed[2] else None
    code = functions().route_backward(
        *(pointer(x), pointer(scale_CD), pointer(cluster_T), pointer(embedding)),
        *(T, D, E, K, *settings.numbers, affinity_TE.data_ptr(), ids_TK.data_ptr()),
        *(gate_TK.data_ptr(), pointer(load_E), pointer(of_gate), pointer(of_affinity)),
        *(pointer(of_sum), pointer(of_balance), pointer(of_x), pointer(grad_x)),
        *(pointer(grad_embedding), pointer(grad_bias)),
    )
    if code != SERVED:
        raise MemoryError("no memory for the gradients of the router")
    return grad_x, grad_embedding, grad_bias


def _in_torch(
    saved: Saved,
    shape: torch.Size,
    settings: Settings,
    needed: tuple[bool, ...],
    grads: tuple[Tensor | None, ...],
) -> Gradients:
    """Compute `_backward` in PyTorch, where it is traced, batched or differentiated."""
    of_x = grads[4]
    change_TE = _affinity_gradient(saved, settings, grads)
    x, embedding, scale_TD = saved.x, saved.embedding, None
    if saved.scale is not None and saved.cluster is not None:
        scale_TD = rows_of(saved.scale, saved.cluster)
    grad_x = grad_embedding = None
    if embedding is not None:
        grad_TD = change_TE @ embedding
        grad_TD = grad_TD if scale_TD is None else grad_TD * scale_TD
        grad_x = grad_TD.reshape(shape) if of_x is None else grad_TD.reshape(shape) + of_x
    if x is not None:
        x_TD = x.reshape(-1, shape[-1])
        grad_embedding = change_TE.mT @ (x_TD if scale_TD is None else x_TD * scale_TD)
    return grad_x, grad_embedding, change_TE.sum(-2) if needed[2] else None


def _affinity_gradient(
    saved: Saved, settings: Settings, grads: tuple[Tensor | None, ...]
) -> Tensor:
    """Return the gradient (T, E) of the affinities."""
    ids_TK, gate_TK, affinity_TE, load_E = saved[4:]
    of_gate, of_affinity, of_sum, of_balance = grads[:4]
    change_TE = torch.zeros_like(affinity_TE) if of_affinity is None else of_affinity
    if of_balance is not None and load_E is not None:
        weight = settings.numbers[2] / len(gate_TK)
        of_sum = of_balance * weight * len(load_E) * load_E / load_E.sum()
    if of_sum is not None:
        temperature = settings.numbers[1]
        all_TE = (affinity_TE / temperature).softmax(-1)
        change_TE = change_TE + _through_softmax(all_TE, of_sum) / temperature
    if of_gate is None:
        return change_TE
    chosen_TKE = torch.nn.functional.one_hot(ids_TK, affinity_TE.shape[1]).to(affinity_TE.dtype)
    if settings.over_selected:
        of_chosen_TK = _through_softmax(gate_TK, of_gate)
        return change_TE + (of_chosen_TK[..., None] * chosen_TKE).sum(-2)
    of_all_TE = (of_gate[..., None] * chosen_TKE).sum(-2)
    return change_TE + _through_softmax(affinity_TE.softmax(-1), of_all_TE)


def _through_softmax(gate: Tensor, of_gate: Tensor) -> Tensor:
    """Return the gradient of the values whose softmax over the last dimension is `gate`."""
    return gate * (of_gate - (gate * of_gate).sum(-1, keepdim=True))
