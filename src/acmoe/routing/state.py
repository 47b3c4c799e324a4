"""The state that flows from one MoE layer to the next, and the decision of a router.

`RoutingState` is passed from layer to layer in one forward pass, the decode slots of
statistics/cache.py from step to step. Both are arguments; no module stores them.

T tokens, D features, E experts, C = E clusters, K experts per token, J clusters per token.
"""

from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from acmoe.errors import UserError, check
from acmoe.ops.route.reference import best_first
from acmoe.ops.sort.order import no_order
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.origin import NextRouter, changed_origin, check_origin, new_origin


class Routing(NamedTuple):
    """One router's decision, used by the experts of the same layer.

    expert_ids     (T, K) int64 experts of each token; E, the number of experts, means "no expert":
                   below a threshold, or dropped
    gate           (T, K) weights of the experts' outputs, 0 where there is no expert
    affinity       (T, E) score of each expert for each token, rescaled if the router is adaptive;
                   training noise included
    loss           () float32 weighted auxiliary losses of this layer
    first          (T,) k*: the expert of highest affinity among those chosen, lowest index among
                   equals, before rows are dropped. None: the argmax of the affinity.
    expert_input   (..., D) the tokens that the experts read: x, or M x under `scale_experts`.
                   None: x.
    """

    expert_ids: Tensor
    gate: Tensor
    affinity: Tensor
    loss: Tensor
    first: Tensor | None = None
    expert_input: Tensor | None = None


class _StateFields(NamedTuple):
    assignment: Tensor
    membership: Tensor
    scale: Tensor
    aux_loss: Tensor
    order: Tensor = torch.empty(0, dtype=torch.int32)
    origin: Tensor = torch.empty(0, dtype=torch.int8)


class RoutingState(_StateFields):
    """The data that an MoE layer passes to the next: six contiguous tensors.

    assignment   (T, J) int64 clusters of each token, best first; -1: none yet. A cluster is the set
                 of tokens that chose the same expert first.
    membership   (T, J) weights of those clusters, summing to one
    scale        (C, D) diagonals of M. If the next router takes its own statistics: ones, and zeros
                 for clusters after the last that a token chose (`AdaptiveConfig.mean_over`).
    aux_loss     () sum, at least in float32, of the auxiliary losses of the MoE layers so far
    order        int32 packed `TokenOrder`: the tokens sorted by `assignment`
                 (ops/sort/order.py); empty: not sorted. It only saves time: results without it are
                 the same up to rounding.
    origin       int8 and empty; its shape encodes what the layer before computed, and for which
                 router (routing/origin.py). The default: nothing came before, or the state was
                 made by hand.

    A state may be cloned, moved, checkpointed or sent to another pipeline stage tensor by tensor:
    `RoutingState(*(tensor.clone() for tensor in state))` behaves as the original.
    """

    __slots__ = ()

    @classmethod
    def identity(
        cls,
        *,
        num_tokens: int,
        num_clusters: int,
        dim: int,
        mix: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "RoutingState":
        """Return the state before the first MoE layer: M = I, no token in any cluster.

        With it every adaptive router equals its base router bitwise, in every statistics mode.
        """
        if not _is_count(mix):
            raise UserError(f"mix={mix!r}; it must be a whole number of clusters, 1 or more")
        sizes = {"num_tokens": num_tokens, "num_clusters": num_clusters, "dim": dim}
        for name, size in sizes.items():
            if not _is_size(size):
                raise UserError(f"{name}={size!r}; it must be a whole number, 0 or more")
        assignment, membership = no_cluster(num_tokens, mix, device=device, dtype=dtype)
        scale = torch.ones(num_clusters, dim, device=device, dtype=dtype)
        aux_loss = torch.zeros((), device=device, dtype=torch.float32)
        empty = no_order(assignment), new_origin((), assignment)
        return cls(assignment, membership, scale, aux_loss, *empty)

    @classmethod
    def before(cls, x: Tensor, *, num_clusters: int, mix: int = 1) -> "RoutingState":
        """Return the identity for tokens x (..., D), on their device and in their precision."""
        return cls.identity(
            num_tokens=count_tokens(x),
            num_clusters=num_clusters,
            dim=x.shape[-1],
            mix=mix,
            device=x.device,
            dtype=accumulation_dtype(x.dtype),
        )

    def _replace(self, **changes: Any) -> "RoutingState":
        """Replace fields; a new assignment without an order also clears the order.

        A new scale makes the state count as made by hand: every router takes it as it is.
        """
        assignment, scale = "assignment" in changes, "scale" in changes
        if assignment and "order" not in changes:
            changes["order"] = no_order(changes["assignment"])
        if (assignment or scale) and "origin" not in changes:
            changes["origin"] = changed_origin(self.origin, assignment=assignment, scale=scale)
        values = {**dict(zip(self._fields, self, strict=True)), **changes}
        return RoutingState(**values)


# `torch.export.save` writes the types of a program's inputs and outputs by these names.
# The function is not public: without it, only the saving of such programs is lost, with an error.
if hasattr(pytree, "_register_namedtuple"):
    for _type in (Routing, RoutingState):
        pytree._register_namedtuple(_type, serialized_type_name=f"acmoe.{_type.__name__}")


def no_cluster(
    num_tokens: int, mix: int, *, device: torch.device | str | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the (T, J) assignment and membership of tokens that belong to no cluster."""
    assignment = torch.full((num_tokens, mix), -1, device=device, dtype=torch.int64)
    if mix == 1:
        return assignment, torch.ones(num_tokens, 1, device=device, dtype=dtype)
    membership = torch.zeros(num_tokens, mix, device=device, dtype=dtype)
    membership[:, 0] = 1.0
    return assignment, membership


def clusters_of(
    affinity_TE: Tensor,
    mix: int,
    *,
    detach: bool = True,
    first_T: Tensor | None = None,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the `mix` clusters of highest affinity, best first, and the softmax over them, (T, J).

    Among equal affinities the lowest index comes first. first_T: the token's first cluster
    (`Routing.first`), None for the argmax of the affinity; the others follow by affinity. The
    clusters have no gradient; their weights, which enter the token's scale, have one unless
    `detach`. before: the weights of the previous state; where it and this one have a single cluster
    per token, all weights are ones, and the same tensor is returned.
    """
    if mix == 1:
        first_T = affinity_TE.detach().argmax(-1) if first_T is None else first_T
        first_T1 = first_T.view(-1, 1)
        if (
            before is not None
            and before.shape == first_T1.shape
            and (before.dtype, before.device) == (affinity_TE.dtype, affinity_TE.device)
        ):
            return first_T1, before
        return first_T1, affinity_TE.new_ones(first_T1.shape)
    if detach:
        affinity_TE = affinity_TE.detach()
    value_TE = affinity_TE.detach()
    if first_T is not None:  # it need not have the highest affinity: selection may be biased
        value_TE = value_TE.masked_fill(value_TE.isnan(), float("-inf"))
        value_TE = value_TE.scatter(1, first_T[:, None], float("nan"))  # NaN ranks first
    clusters_TJ = best_first(value_TE, mix)
    return clusters_TJ, affinity_TE.gather(1, clusters_TJ).softmax(-1)


def first_choice(routing: Routing) -> Tensor:
    """Return (T,) int64 k*: the expert whose cluster each token belongs to."""
    return routing.affinity.detach().argmax(-1) if routing.first is None else routing.first


def _is_count(value: Any) -> bool:
    """Return True for whole numbers from 1 on, also those of numpy."""
    whole = type(value) is int or isinstance(value, Integral)
    return whole and not isinstance(value, bool) and int(value) >= 1


def _is_size(value: Any) -> bool:
    """Return True for whole numbers from 0 on, also those of numpy and torch.

    `torch.jit.trace` makes sizes tensors, and warns where their values are read.
    """
    if isinstance(value, Tensor):
        inexact = value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
        tracing = torch._C._get_tracing_state() is not None
        return value.dim() == 0 and not inexact and (tracing or bool(value >= 0))
    whole = type(value) is int or isinstance(value, Integral | torch.SymInt)
    return whole and not isinstance(value, bool) and bool(value >= 0)


def check_mix(mix: int, num_clusters: int) -> None:
    check(mix <= num_clusters, f"mix={mix} exceeds num_experts={num_clusters}; lower mix")


def count_tokens(x: Tensor) -> int:
    """Return the number of tokens in x (..., D); `Size.numel()` would fix it in `torch.export`."""
    return x.shape[0] if x.dim() == 2 else x.numel() // x.shape[-1]


def check_num_tokens(state: RoutingState, x: Tensor) -> None:
    """Raise a UserError unless the state has one entry per token of x."""
    num_tokens = count_tokens(x)
    if state.assignment.shape[0] != num_tokens:
        raise UserError(
            f"state.assignment has shape {tuple(state.assignment.shape)}; x has {num_tokens} "
            "tokens: pass the state of the same tokens, or none in the first MoE layer"
        )


def check_routing_of(x: Tensor, routing: object) -> None:
    """Raise a UserError unless `routing` is a router's result for as many tokens as x has."""
    if not isinstance(routing, Routing):
        raise UserError(f"routing is a {type(routing).__name__}; pass what router(x, state) gave")
    found = routing.affinity.shape[0]
    if found != count_tokens(x):
        raise UserError(
            f"routing is of {found} tokens, and x has {count_tokens(x)}; pass the x that it was "
            "decided for"
        )


def check_state(
    state: RoutingState, x: Tensor, mix: int, num_clusters: int, reader: NextRouter
) -> None:
    """Raise a UserError unless the state fits the tokens and the router that reads it."""
    if state.origin.shape != reader.origin_shape:
        check_origin(state.origin, reader)
    if state.scale.dtype in (torch.bfloat16, torch.float16):
        raise UserError(
            f"state.scale arrives in {state.scale.dtype}, and a rounded scale routes otherwise: "
            "pass the state in float32 (under FSDP2: "
            "MixedPrecisionPolicy(cast_forward_inputs=False))"
        )
    if state.assignment.dtype not in (torch.int64, torch.int32):
        raise UserError(
            f"state.assignment arrives in {state.assignment.dtype}; it holds numbers of clusters: "
            "pass it as torch.int64"
        )
    num_tokens, dim = count_tokens(x), x.shape[-1]
    if state.assignment.shape == (num_tokens, mix) and state.scale.shape == (num_clusters, dim):
        return
    if state.assignment.dim() == 2:
        check_num_tokens(state, x)
    check(
        state.assignment.shape == (num_tokens, mix),
        f"state.assignment has shape {tuple(state.assignment.shape)}; {num_tokens} tokens and "
        f"mix={mix} need ({num_tokens}, {mix}): begin with RoutingState.identity(num_tokens="
        f"{num_tokens}, mix={mix}, ...), and give the layer before this router's config as "
        "next_router",
    )
    check(
        state.scale.shape[0] == num_clusters,
        f"state.scale has {state.scale.shape[0]} clusters; this router has {num_clusters}: "
        "consecutive MoE layers must agree on num_experts",
    )
    check(
        state.scale.shape[1] == dim,
        f"state.scale has {state.scale.shape[1]} features; the tokens have {dim}: where the width "
        "changes, begin anew with RoutingState.identity(...)",
    )
