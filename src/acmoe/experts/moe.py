"""The MoE layer: a router, experts, and the routing state for the next layer.

T tokens, or B sequences of L tokens; D features, E experts.
"""

from typing import Any

import torch
from torch import Tensor

from acmoe.config.model_checks import check_capacity, check_top_k
from acmoe.config.routing import AdaptiveConfig, LossConfig, RandomConfig, RouterConfig
from acmoe.errors import UserError, check
from acmoe.experts.capacity import limit_capacity
from acmoe.experts.mlp import ExpertMLP, shaped_as
from acmoe.experts.old_names import NOT_GIVEN, rename_emitter, renamed_emit
from acmoe.ops.checks import check_whole
from acmoe.ops.sort import sort_rows
from acmoe.routing.build import build_router
from acmoe.routing.next_state import SAME_ROUTER, NextState
from acmoe.routing.rescaling import count_state
from acmoe.routing.router import Router, blank, flat_mask, unwrapped
from acmoe.routing.soft import SoftRouter
from acmoe.routing.state import Routing, RoutingState
from acmoe.routing.statistics.cache import LayerCache, check_cache
from acmoe.routing.statistics.registry import Layer

_NO_CACHE = LayerCache(None, None)


class MoE(Layer):
    """A mixture-of-experts layer for any model: (x, state) -> (y, state).

    y does not include the residual; pass the state to the next MoE layer, and none to the first.

    dim, hidden       features of a token, and hidden units of an expert
    num_experts       number of experts
    top_k             number of experts that a token is sent to
    router            a name, a config such as `AdaptiveConfig(...)`, or a `Router` module
    next_router       config of the next MoE layer's router, for which this layer computes
                      statistics; None if no adaptive layer follows. Default: that of `router`,
                      unless an `acmoe.MoEStack` plans it.
    activation        relu, gelu or swiglu, which has a gate: the up projection is then twice as
                      wide
    bias, dropout     biases of the experts' projections; dropout on their hidden units
    init              fan_in: the experts' weights are drawn from +-1/sqrt(inputs). published: from
                      the smaller range of the published code.
    capacity_factor   None: no row is dropped. A number: an expert takes at most
                      k * floor(factor * ceil(T / E)) rows; the others get output 0 (Swin-MoE).
    losses            weights of the auxiliary losses summed into `state.aux_loss`

    With top_k = 1 the gate is a softmax over all experts, otherwise over the chosen ones
    (`SMoEConfig.gate`). An adaptive router scales features by 1/s, s the dispersion within a
    cluster, raised to at least 1e-3 of its cluster's mean (`AdaptiveConfig.floor`); a cluster with
    fewer than 2 tokens is not rescaled (`min_tokens`).

    >>> moe = MoE(dim=8, hidden=16, num_experts=4, top_k=2, router="adaptive")
    >>> y, state = moe(torch.randn(5, 8))
    >>> y.shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        *,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        router: str | RouterConfig | Router = "smoe",
        next_router: AdaptiveConfig | RandomConfig | str | None = SAME_ROUTER,
        activation: str = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        init: str = "fan_in",
        capacity_factor: float | None = None,
        losses: LossConfig | None = None,
        emit: Any = NOT_GIVEN,
    ) -> None:
        super().__init__()
        router = _router_of(router, dim, num_experts, top_k, losses)
        check_capacity(capacity_factor)
        self.dim = dim
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.router = router
        self.experts = ExpertMLP(
            dim=dim,
            hidden=hidden,
            num_experts=num_experts,
            activation=activation,
            bias=bias,
            dropout=dropout,
            init=init,
        )
        self.next_state = NextState.after(router, renamed_emit(next_router, emit))
        self.register_load_state_dict_pre_hook(rename_emitter)  # type: ignore[no-untyped-call]

    @property
    def top_k(self) -> int:
        """The number of experts per token, that of the router."""
        return int(unwrapped(self.router).top_k)

    @top_k.setter
    def top_k(self, value: int) -> None:
        check_whole(value, "top_k")
        check_top_k(value, self.num_experts)
        unwrapped(self.router).top_k = value

    def forward(
        self,
        x: Tensor,
        state: RoutingState | None = None,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        cache: LayerCache | None = None,
        expert_input: Tensor | None = None,
    ) -> tuple[Tensor, RoutingState]:
        """Route x (T, D) or (B, L, D) to its experts; return y, shaped as x, and the next state.

        state          from the MoE layer before; None in the first one
        token_mask     (T,) or (B, L), False for padding, which goes to no expert and gets output 0
        token_ids      (T,) or (B, L), for routers that read them (hash, stable)
        cache          from `new_cache`, for decoding
        expert_input   x already cast to the dtype of the experts' GEMMs, if the caller has it; the
                       experts then read it instead of x. It is ignored with a token mask, and if
                       the router passes rescaled tokens to the experts.
        """
        first_layer = state is None
        router = unwrapped(self.router)
        count_state(router, state)
        state = router.state_for(x, state)
        slots = _NO_CACHE if cache is None else cache
        if cache is not None:
            check_cache(cache, x)
        routing = self.router(
            x, state, token_mask=token_mask, token_ids=token_ids, cache=slots.router
        )
        x = blank(x, token_mask)
        mask_T = flat_mask(token_mask)
        sent = self._sent(routing, mask_T)
        clusters_T = self.next_state.clusters(routing)
        rows = sort_rows(sent.expert_ids, self.num_experts, cluster=clusters_T, token_mask=mask_T)
        state = self.next_state(
            *(x, routing, state),
            token_mask=token_mask,
            slot=slots.next_state,
            order=rows.order,
            first_layer=first_layer,
        )
        plain = token_mask is None and not router.scale_experts
        input_TD = self._expert_input(x, routing, expert_input, plain=plain)
        complete = self.capacity_factor is None and token_mask is None and router.always_k
        y = self.experts(input_TD, rows, sent.gate, complete=complete)
        return blank(shaped_as(x, y), token_mask), state

    def _expert_input(
        self, x: Tensor, routing: Routing, given: Tensor | None, *, plain: bool
    ) -> Tensor:
        """Return (T, D) the tokens that the experts read.

        given: `expert_input` of `forward`. plain: True if it holds the same tokens as x.
        """
        if given is not None and given.shape != x.shape:
            shapes = f"{tuple(given.shape)}, and x {tuple(x.shape)}"
            raise UserError(f"expert_input has the shape {shapes}; it must be x in another dtype")
        if given is None or not plain:
            given = x if routing.expert_input is None else routing.expert_input
        return given if x.dim() == 2 else given.reshape(-1, self.dim)

    def _sent(self, routing: Routing, mask_T: Tensor | None) -> Routing:
        """Return the routing without padding and without rows beyond an expert's capacity.

        An expert that the layer does not have would count as none, and its tokens get no output.
        """
        if routing.affinity.shape[-1] != self.num_experts:
            raise UserError(
                f"the router chooses among {routing.affinity.shape[-1]} experts, and the layer has "
                f"num_experts={self.num_experts}; give both the same number"
            )
        if mask_T is not None:
            # Padding goes to no expert, so it costs nothing and changes no rounding of a GEMM.
            nowhere = routing.expert_ids.masked_fill(~mask_T[:, None], self.num_experts)
            routing = routing._replace(expert_ids=nowhere)
        if self.capacity_factor is None:
            return routing
        return limit_capacity(routing, self.num_experts, self.top_k, self.capacity_factor, mask_T)

    def new_cache(
        self,
        num_sequences: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> LayerCache:
        """Return this layer's decode cache; `running` statistics need none: their slot is None."""
        return LayerCache(
            unwrapped(self.router).new_slot(num_sequences, device=device, dtype=dtype),
            self.next_state.new_slot(num_sequences, device=device, dtype=dtype),
        )


def _router_of(
    router: str | RouterConfig | Router,
    dim: int,
    num_experts: int,
    top_k: int,
    losses: LossConfig | None,
) -> Router:
    """Return the given router, or build one from its name or config; check that it fits."""
    if isinstance(router, Router):
        check(losses is None, f"losses={losses} beside a Router; give them to it instead")
        check(
            router.next_layer is None,
            "router was built with standalone=True, and acmoe.MoE computes the next state "
            "itself; build it without",
        )
    else:
        router = build_router(router, dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
    for name, wanted in (("dim", dim), ("num_experts", num_experts), ("top_k", top_k)):
        found = getattr(router, name)
        check(
            found == wanted,
            f"router has {name}={found}, the layer {name}={wanted}; build both with the same",
        )
    check(
        not isinstance(getattr(router, "base", router), SoftRouter),
        "router='soft' fills slots instead of choosing experts; use acmoe.SoftMoE",
    )
    return router
