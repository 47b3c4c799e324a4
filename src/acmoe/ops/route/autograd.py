"""The fused router as a custom op with a gradient; ops/route/reference.py defines what it computes.

T tokens, D features, E experts, C clusters, K experts per token, X slots of sorted tokens.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from acmoe.config.environment import router_saving_requested
from acmoe.ops.dispatch import eager
from acmoe.ops.flops import tell_counters
from acmoe.ops.once import apply, as_saved, differentiable_once
from acmoe.ops.taped import taped


@torch.library.custom_op("acmoe::route", mutates_args=())
def route_op(
    x: Tensor,
    embedding: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    assignment: Tensor | None,
    top_k: int,
    over_selected: bool,
    token_mask: Tensor | None,
    temperature: float,
    permutation: Tensor | None,
    end: Tensor | None,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return expert ids (T, K), gates (T, K), affinities (T, E), the gate sum (E,) and load (E,) of
    the balance loss, and each token's first choice (T,).

    permutation (X,) and end (C + 1,) are `token` and `end` of a `TokenOrder`, or None if tokens are
    not sorted; the backward reads `end`.
    """
    ids, gate, affinity, gate_sum, load, first = _launched(
        *(x, embedding, bias, scale, assignment, top_k, over_selected, token_mask, temperature),
        *(permutation, end, noise),
    )
    return ids, gate, affinity, gate_sum, load, first


def _launched(*inputs: Any, **options: Any) -> tuple[Tensor, ...]:
    """Return the results of `route_op`.

    inputs: its arguments; options: further arguments of `route` (triton/route.py).
    """
    from acmoe.ops.route.triton.few_tokens import in_ranges
    from acmoe.ops.route.triton.route import in_one_kernel, route
    from acmoe.ops.route.triton.tokens import Tokens

    x, embedding, bias, scale, assignment, top_k, over_selected, token_mask, *rest = inputs
    temperature, permutation, end, noise = rest
    if in_ranges(x, embedding) or in_one_kernel(x, embedding, token_mask, top_k):
        permutation = end = None
    tokens = Tokens.of(x, scale, assignment, token_mask, permutation, end)
    return route(tokens, embedding, bias, top_k, over_selected, temperature, noise, **options)


def _without_gradient(totals: str, weight: float, keeps: bool, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the results of `_launched` by a tape."""
    *first, top_k, over_selected, token_mask, temperature, permutation, end, noise = inputs
    tensors = (*first, token_mask, permutation, end, noise)
    settings = (top_k, over_selected, temperature, totals, weight, keeps)
    return taped(_run_tensors, tensors, settings)


def _run_tensors(*inputs: Any) -> tuple[Tensor, ...]:
    x, embedding, bias, scale, assignment, token_mask, permutation, end, noise, *settings = inputs
    top_k, over_selected, temperature, totals, weight, keeps = settings
    first = (x, embedding, bias, scale, assignment, top_k, over_selected, token_mask, temperature)
    options = {"totals": totals, "weight": weight, "keeps": keeps}
    return _launched(*first, permutation, end, noise, **options)


@route_op.register_fake
def _(x, embedding, bias, scale, assignment, top_k, *rest):  # type: ignore[no-untyped-def]
    affinity = x.new_empty(x.shape[0], embedding.shape[0], dtype=torch.float32)
    gate = affinity.new_empty(x.shape[0], top_k)
    ids = gate.new_empty(gate.shape, dtype=torch.int64)
    gate_sum = affinity.new_empty(embedding.shape[0])
    return ids, gate, affinity, gate_sum, torch.empty_like(gate_sum), ids.new_empty(x.shape[0])


@torch.library.custom_op("acmoe::route_backward", mutates_args=())
def route_backward_op(
    grad_gate: Tensor | None,
    grad_affinity: Tensor | None,
    grad_sum: Tensor | None,
    grad_x: Tensor | None,
    x: Tensor,
    embedding: Tensor,
    scale: Tensor | None,
    assignment: Tensor | None,
    token_mask: Tensor | None,
    permutation: Tensor | None,
    end: Tensor | None,
    expert_ids: Tensor,
    gate: Tensor,
    affinity: Tensor,
    over_selected: bool,
    temperature: float,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the embedding and of the bias.

    The last two are float32; that of the bias is empty if there is no bias. grad_x is the gradient
    of x from its other consumers; the kernel adds it to the router's.
    """
    tensors = (x, embedding, scale, assignment, token_mask, permutation, end)
    saved = _Saved(*tensors, expert_ids, gate, affinity)
    grads = _Upstream(grad_gate, grad_affinity, grad_sum, grad_x)
    settings = _Settings(over_selected, temperature, has_bias)
    return _launched_backward(saved, grads, settings, torch.float32)


class _Saved(NamedTuple):
    """The arguments and the results of `route_op` that its backward reads."""

    x: Tensor
    embedding: Tensor
    scale: Tensor | None
    assignment: Tensor | None
    token_mask: Tensor | None
    permutation: Tensor | None
    end: Tensor | None
    expert_ids: Tensor
    gate: Tensor
    affinity: Tensor


class _Upstream(NamedTuple):
    """The gradients of the results of `route_op`, and that of x from its other consumers."""

    gate: Tensor | None
    affinity: Tensor | None
    gate_sum: Tensor | None
    x: Tensor | None


class _Settings(NamedTuple):
    """The arguments of `route_backward_op` that are no tensors."""

    over_selected: bool
    temperature: float
    has_bias: bool


def _launched_backward(
    saved: _Saved,
    grads: _Upstream,
    settings: _Settings,
    result: torch.dtype,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `route_backward_op`.

    result: the dtype of the embedding's gradient; kept: see `embedding_gradient`.
    """
    from acmoe.ops.device.reduce_partials import reduce_partials
    from acmoe.ops.route.triton.affinity_gradient import affinity_gradient
    from acmoe.ops.route.triton.backward import embedding_gradient, token_gradient
    from acmoe.ops.route.triton.tokens import Tokens

    x, embedding, mask, end = saved.x, saved.embedding, saved.token_mask, saved.end
    tokens = Tokens.of(x, saved.scale, saved.assignment, mask, saved.permutation, end)
    over_selected, temperature, has_bias = settings
    num_parts = 3 if x.dtype == torch.float32 else 2
    grad_ZTE, partial_NE = affinity_gradient(
        *(grads.gate, grads.affinity, grads.gate_sum),
        *(saved.expert_ids, saved.gate, saved.affinity),
        mask,
        over_selected,
        temperature,
        num_parts,
    )
    grad_TD = token_gradient(tokens, grad_ZTE, embedding, grads.x)
    grad_bias = reduce_partials(partial_NE[None])[0] if has_bias else partial_NE.new_empty(0)
    grad_ED = embedding_gradient(tokens, end, grad_ZTE, embedding.dtype, result, kept)
    return grad_TD, grad_ED, grad_bias


@route_backward_op.register_fake
def _(g_gate, g_affinity, g_sum, g_x, x, embedding, *rest):  # type: ignore[no-untyped-def]
    *_, affinity, _, _, has_bias = rest
    grad_embedding = affinity.new_empty(embedding.shape)
    grad_bias = affinity.new_empty(embedding.shape[0] if has_bias else 0)
    return x.new_empty(x.shape), grad_embedding, grad_bias


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    expert_ids, _, _, _, load, first = output
    ctx.mark_non_differentiable(expert_ids, load, first)
    _save_tensors(ctx, inputs, output, None, None)


def _save_tensors(ctx, inputs, output, share, kept) -> None:  # type: ignore[no-untyped-def]
    x, embedding, bias, scale, assignment, _, ctx.over_selected, mask, *rest = inputs
    ctx.temperature, permutation, end, _ = rest
    ctx.set_materialize_grads(False)
    tensors = (x, embedding, scale, assignment, mask, permutation, end)
    ctx.save_for_backward(*tensors, *output[:3], share, kept)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, _ids, grad_gate, grad_affinity, grad_sum, _load, _first):  # type: ignore[no-untyped-def]
    return *_input_gradients(ctx, grad_gate, grad_affinity, grad_sum, None), *[None] * 9  # type: ignore[no-untyped-call]


def _input_gradients(ctx, grad_gate, grad_affinity, grad_sum, grad_x):  # type: ignore[no-untyped-def]
    """Return the gradients of x, of the embedding and of the bias."""
    # Read once: checkpointing unpacks each tensor only once.
    *saved, share, kept = as_saved(ctx.saved_tensors)
    x, embedding = saved[:2]
    has_bias = ctx.bias_dtype is not None
    grads = (grad_gate, grad_affinity, grad_sum, grad_x)
    settings = ctx.over_selected, ctx.temperature, has_bias
    weight = 1.0 if share is None else ctx.weight
    if not torch.is_grad_enabled() and eager(*saved, *grads):  # the op raises for create_graph
        given = [None if one is None else one.contiguous() for one in grads]
        share = None if grad_sum is None else share
        found = taped(
            _with_share, (*saved, *given, share, kept), (*settings, embedding.dtype, weight)
        )
    else:
        if share is not None and grad_sum is not None:
            # grad_sum is the gradient of the balance loss. Autograd would multiply in this order,
            # which decides the rounding.
            grad_sum = share * (grad_sum * weight * len(share)) / len(x)
        found = route_backward_op(grad_gate, grad_affinity, grad_sum, grad_x, *saved, *settings)
    grad_x, grad_embedding, grad_bias = found
    grad_embedding = grad_embedding.to(embedding.dtype)
    return grad_x, grad_embedding, grad_bias.to(ctx.bias_dtype) if has_bias else None


def _with_share(*inputs: Any) -> tuple[Tensor, ...]:
    """Return the results of `_launched_backward`.

    If share is given, the gradient of the gate sums is computed from that of the balance loss,
    which stands in its place.
    """
    *tensors, share, kept, over_selected, temperature, has_bias, result, weight = inputs
    saved, grads = _Saved(*tensors[:10]), _Upstream(*tensors[10:])
    if share is not None and grads.gate_sum is not None:
        from acmoe.ops.route.triton.affinity_gradient import share_gradient

        gate_sum = share_gradient(grads.gate_sum, share, len(saved.x), weight)
        grads = grads._replace(gate_sum=gate_sum)
    settings = _Settings(over_selected, temperature, has_bias)
    return _launched_backward(saved, grads, settings, result, kept)


route_op.register_autograd(_backward, setup_context=_save)


class _Call(NamedTuple):
    """The options of a call of `_Eager`, and a list for its results without gradient."""

    # True: launch by a tape, and return what `totals` asks for. False: call `route_op`, because
    # something observes the call.
    repeats: bool
    passes: bool  # return x as well
    totals: str  # that of `route_through`, or "shares": see `route` (triton/route.py)
    weight: float
    found: list[Any]  # receives ids, load, first choice, and a zero loss or None


class _Eager(torch.autograd.Function):
    """The router outside `torch.compile`; returns gates, affinities and gate sum, then x or not.

    rest: the other inputs of `route_op`. Autograd takes a microsecond or two of the host for every
    argument and result that it sees, so that the options and the results without gradient are in
    `call`.
    """

    @staticmethod
    def forward(ctx, x, embedding, bias, rest, call):  # type: ignore[no-untyped-def]
        repeats, passes, totals, weight, found = call
        inputs = (x, embedding, bias, *rest)
        keeps = ctx.needs_input_grad[1] and router_saving_requested() == "auto"
        run = partial(_without_gradient, totals, weight, keeps) if repeats else route_op
        results = run(*inputs)
        ids, gate, affinity, gate_sum, load, first, *kept = results
        zero = None
        if repeats and totals == "none":
            zero, gate_sum, load = gate_sum, None, None
        found += (ids, load, first, zero)
        ctx.weight = weight
        share = load if repeats and totals == "shares" else None
        _save_tensors(ctx, inputs, results, share, *(kept or [None]))
        return (gate, affinity, gate_sum, x) if passes else (gate, affinity, gate_sum)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_gate, grad_affinity, grad_sum, grad_x=None):  # type: ignore[no-untyped-def]
        grads = (grad_gate, grad_affinity, grad_sum, grad_x)
        return *_input_gradients(ctx, *grads), None, None  # type: ignore[no-untyped-call]


# Partial sums, of tokens times experts, up to which one program adds up the balance loss of a
# recorded call. Beyond them the GPU takes longer than the host, and several programs are faster.
_FEW_AFFINITIES = 2**18


def route_through(*inputs: Any, totals: str, weight: float = 1.0) -> tuple[Any, ...]:
    """Return the results of `route_op`, then x, for the layers that read x after the router.

    totals: "sums" for gate sum and load; "none" if the caller reads neither; "balance" if it reads
    their balance loss alone, times `weight`. The last result is that loss, or 0 for "none". It is
    None for "sums", if something observes the call, and for "balance" of many tokens whose gradient
    is recorded: gate sum and load are then returned.

    In eager mode the returned x is an output of this autograd node: the backward kernel adds its
    gradient to the router's own, which saves a launch that reads both. A custom op may not return
    an input, so a compiled call returns x unchanged.
    """
    x, embedding, bias, scale = inputs[:4]
    recorded = torch.is_grad_enabled() and any(
        [one is not None and one.requires_grad for one in (x, embedding, bias)]
    )
    repeats = eager(x, embedding, bias, scale, inputs[4], inputs[7])
    if not recorded and repeats:
        found = _without_gradient(totals, weight, False, *inputs)
        return *found, x, None if totals == "sums" else found[3]
    passes = recorded and x.requires_grad
    if not repeats:
        tell_counters()
        if is_compiling() or not passes:
            return *route_op(*inputs), x, None
    if totals == "balance":
        affinities = x.shape[0] * embedding.shape[0]
        totals = "shares" if affinities <= _FEW_AFFINITIES else "sums"
    constant: list[Any] = []
    learned = (x, embedding, bias, inputs[3:])
    results = apply(_Eager, *learned, _Call(repeats, passes, totals, weight, constant))
    ids, load, first, zero = constant
    gate, affinity, gate_sum = results[:3]
    balance = gate_sum if repeats and totals == "shares" else zero
    outputs = (ids, gate, affinity, gate_sum, load, first)
    return *outputs, results[3] if passes else x, balance
