"""Compute the state for the next MoE layer: each token's clusters, and the scale of each cluster.

The scale is computed in the layer whose tokens are measured, so that the state carries (C, D)
numbers instead of (T, D). If no adaptive layer follows, the state is the identity.

T tokens, or B sequences of L tokens; D features, C clusters, J clusters per token.
"""

import torch
from torch import Tensor, nn

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import UserError, check
from acmoe.ops.empty import no_elements
from acmoe.ops.exporting import exporting
from acmoe.ops.ones import ones_like
from acmoe.ops.precision import without_autocast
from acmoe.ops.reentrant import check_reentrant
from acmoe.ops.sort.order import (
    no_order,
    order_is_read,
    worth_routing_sorted,
    worth_sorting,
)
from acmoe.ops.statistics.chosen import clusters_up_to_last
from acmoe.routing.origin import NextRouter, describe, holds_nothing, origin_codes, origin_shape
from acmoe.routing.rescaling import RescalingRouter
from acmoe.routing.router import Router, flat_mask
from acmoe.routing.state import Routing, RoutingState, clusters_of, no_cluster
from acmoe.routing.statistics import ClusterStatistics, build_statistics
from acmoe.routing.statistics.cache import StatisticsSlot

SAME_ROUTER = "as the router"


def resolve_next_router(next_router: NextRouter | str | None, router: Router) -> NextRouter | None:
    """Return the config of the next layer's router; SAME_ROUTER means the config of `router`."""
    if next_router == SAME_ROUTER:
        return router.config if isinstance(router, RescalingRouter) else None
    if next_router is not None and not isinstance(next_router, NextRouter):
        raise UserError(
            f"next_router={next_router!r}; pass the next router's AdaptiveConfig or RandomConfig, "
            "or None"
        )
    return next_router


class NextState(nn.Module):
    """Computes the state for the next MoE layer, whose router has the config `next_router`.

    fixed: the user has named the next router, so that `plan` may not choose another.
    """

    def __init__(
        self, next_router: NextRouter | None, *, num_clusters: int, dim: int, fixed: bool = True
    ) -> None:
        super().__init__()
        self.num_clusters = num_clusters
        self.dim = dim
        self.fixed = fixed
        self.statistics: ClusterStatistics | None = None
        self._compute_for(next_router)

    @classmethod
    def after(cls, router: Router, next_router: NextRouter | str | None) -> "NextState":
        """Return the module that computes the state behind a layer with this router.

        next_router: what the user gave to the layer; for SAME_ROUTER, `plan` may change it later.
        """
        return cls(
            resolve_next_router(next_router, router),
            num_clusters=router.num_experts,
            dim=router.dim,
            fixed=next_router != SAME_ROUTER,
        )

    def _compute_for(self, next_router: NextRouter | None) -> None:
        self.next_router = next_router
        self.statistics = None
        if isinstance(next_router, AdaptiveConfig) and next_router.reads == "previous":
            self.statistics = build_statistics(
                next_router, num_clusters=self.num_clusters, dim=self.dim
            )

    def plan(self, next_router: NextRouter | None, *, like: Tensor, final: bool = True) -> None:
        """Compute the state for this next router from now on.

        New statistics are built on the device of `like`. Nothing changes if the module computes
        that state already. final: no later call of `plan` may choose another router.
        """
        same = origin_codes(next_router) == origin_codes(self.next_router)
        if not same or getattr(next_router, "mix", 1) != getattr(self.next_router, "mix", 1):
            check(
                not self.fixed,
                f"a layer was built, or planned before, with next_router={_named(self.next_router)}"
                f", and the next router needs {_named(next_router)}; leave it out",
            )
            self._compute_for(next_router)
            self.to(like.device).train(self.training)
        self.fixed = self.fixed or final

    def forward(
        self,
        x: Tensor,
        routing: Routing,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        slot: StatisticsSlot | None = None,
        order: Tensor | None = None,
        first_layer: bool = False,
    ) -> RoutingState:
        """Return the state for the next layer, from the router's input x and its routing.

        order: the packed `TokenOrder` of `clusters(routing)`, masked tokens in no cluster.
        first_layer: no MoE layer came before, and `state` is the identity made for this call.
        """
        aux_loss = routing.loss if first_layer else state.aux_loss + routing.loss
        check_reentrant(aux_loss)
        if self.next_router is None:
            return self._without_clusters(x, routing, state, aux_loss, first_layer)
        # The choice before rows are dropped: a full expert does not change a token's cluster.
        assignment, membership = clusters_of(
            routing.affinity,
            self.next_router.mix,
            detach=self.next_router.detach,
            first_T=routing.first,
            before=state.membership,
        )
        chosen_C = None
        if self.next_router.mean_over != "all":
            # All k choices count, and the clusters whose scales are mixed.
            chosen_C = clusters_up_to_last(
                routing.expert_ids, assignment, routing.affinity.shape[-1], flat_mask(token_mask)
            )
        first_T = assignment[:, 0] if routing.first is None else routing.first
        if self.statistics is None:
            scale = self._unread_scale(state, chosen_C)
        else:
            scale = self._scale(x, first_T, token_mask, slot, order, chosen_C)
        # The order of a masked call is valid for the same mask only, which the next router cannot
        # check.
        if order is None or token_mask is not None:
            order = no_order(x)
        return RoutingState(assignment, membership, scale, aux_loss, order, self._origin(x, state))

    def _without_clusters(
        self, x: Tensor, routing: Routing, state: RoutingState, aux_loss: Tensor, first_layer: bool
    ) -> RoutingState:
        """Return the identity with this aux_loss; reuse the tensors of `state` if they hold it."""
        if holds_nothing(state.origin):
            return RoutingState(*state[:3], aux_loss, *state[4:])
        if first_layer and state.assignment.shape[1] == 1:
            return RoutingState(*state[:3], aux_loss, state.order, self._origin(x, state))
        assignment, membership = no_cluster(
            routing.affinity.shape[0], 1, device=x.device, dtype=state.membership.dtype
        )
        fields = torch.ones_like(state.scale), aux_loss, no_order(x), self._origin(x, state)
        return RoutingState(assignment, membership, *fields)

    def _origin(self, x: Tensor, before: RoutingState) -> Tensor:
        return no_elements(origin_shape(self.next_router), torch.int8, x, known=before.origin)

    def _unread_scale(self, state: RoutingState, chosen_C: Tensor | None) -> Tensor:
        """Return (C, D) ones. With chosen_C, clusters after the last chosen one have zeros."""
        if chosen_C is not None:
            return chosen_C[:, None].expand_as(state.scale).to(state.scale.dtype)
        return ones_like(
            state.scale, holds_ones=state.origin.shape == origin_shape(self.next_router)
        )

    def _scale(
        self,
        x: Tensor,
        first_T: Tensor,
        token_mask: Tensor | None,
        slot: StatisticsSlot | None,
        order: Tensor | None,
        chosen_C: Tensor | None,
    ) -> Tensor:
        """Return the (C, D) scale of the clusters, which the next router reads.

        first_T: (T,) the first cluster of each token, whose dispersion it enters.
        """
        assert self.statistics is not None
        first = first_T if x.dim() == 2 else first_T.view(x.shape[:-1])
        mask = None if token_mask is None else token_mask.view(first.shape)
        with without_autocast(x):
            return self.statistics.cluster_scale(
                x, first, mask, slot, order=order, chosen_C=chosen_C
            )

    def clusters(self, routing: Routing) -> Tensor | None:
        """Return the (T,) clusters by which kernels want the tokens sorted, or None.

        It is None if the next router reads several clusters per token, if the routing lacks the
        first choice, if clusters are too small to gain, or if nothing would read the order. It is
        also None in `torch.export`: clusters would bind the program to many tokens, or to few.
        """
        if not isinstance(self.next_router, AdaptiveConfig) or routing.first is None:
            return None
        if not order_is_read(routing.first) or exporting():
            return None
        if self.next_router.mix != 1 or not worth_sorting(*routing.affinity.shape):
            return None
        # Every mode measures all tokens of a training call. In evaluation only `batch` and
        # `sequence` do; with running averages the next router reads the order.
        mode = self.next_router.modes.when(training=self.training)
        read = self.training or mode in ("batch", "sequence")
        if mode == "running":
            read = read or worth_routing_sorted(*routing.affinity.shape)
        return routing.first if read else None

    def new_slot(
        self, num_sequences: int, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> StatisticsSlot | None:
        """Return the decode slot of the statistics, or None if there are none."""
        if self.statistics is None:
            return None
        return self.statistics.new_slot(num_sequences, device=device, dtype=dtype)


def _named(next_router: NextRouter | None) -> str:
    return "None" if next_router is None else describe(next_router)
