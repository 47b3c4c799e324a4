"""The MoE layer: router, experts, and what the next layer is told. (x, state) -> (x, state).

T tokens, or B sequences of L tokens; D features.
"""

import torch
from torch import Tensor, nn

from acmoe.config.routing import AdaptiveConfig, LossConfig, RandomConfig, RouterConfig
from acmoe.errors import check
from acmoe.experts.dispatch import limit_capacity
from acmoe.experts.emit import AS_ROUTER, Emitter, resolve_emit
from acmoe.experts.mlp import ExpertMLP
from acmoe.ops.checks import check_dim, check_token_mask
from acmoe.ops.precision import without_autocast
from acmoe.routing.build import build_router
from acmoe.routing.cache import LayerCache
from acmoe.routing.router import Router, blank
from acmoe.routing.soft import SoftRouter
from acmoe.routing.state import RoutingState


class MoE(nn.Module):
    """A mixture of experts for anybody's model: y has no residual, the state goes to the next MoE.

    router            a name, a config such as `AdaptiveConfig(...)`, or a `Router` module
    emit              the config of the next MoE layer's router, whose statistics this layer takes;
                      None when no adaptive layer follows. Left out: this layer's own router.
    capacity_factor   None: dropless. A number: at most k * floor(factor * ceil(T / E)) rows an
                      expert, the rest pass with output zero (Swin-MoE).
    losses            weights of the auxiliary losses summed into `state.aux_loss`

    >>> moe = MoE(dim=8, hidden=16, num_experts=4, top_k=2, router="adaptive")
    >>> state = RoutingState.identity(num_tokens=5, num_clusters=4, dim=8)
    >>> y, state = moe(torch.randn(5, 8), state)
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
        emit: AdaptiveConfig | RandomConfig | str | None = AS_ROUTER,
        activation: str = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        init: str = "fan_in",
        capacity_factor: float | None = None,
        losses: LossConfig | None = None,
    ) -> None:
        super().__init__()
        if isinstance(router, Router):
            check(losses is None, f"losses={losses} beside a Router; give them to it instead")
        else:
            router = build_router(
                router, dim=dim, num_experts=num_experts, top_k=top_k, losses=losses
            )
        self._check_router(router, dim, num_experts, top_k)
        check(
            capacity_factor is None or capacity_factor > 0,
            f"capacity_factor={capacity_factor}; it must be positive, or None for dropless",
        )
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = top_k
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
        self.emitter = Emitter(resolve_emit(emit, router), num_clusters=num_experts, dim=dim)

    @staticmethod
    def _check_router(router: Router, dim: int, num_experts: int, top_k: int) -> None:
        for name, wanted in (("dim", dim), ("num_experts", num_experts), ("top_k", top_k)):
            found = getattr(router, name)
            check(
                found == wanted,
                f"router has {name}={found}, the layer {name}={wanted}; build both with the same",
            )
        base = getattr(router, "base", router)
        check(
            not isinstance(base, SoftRouter),
            "router='soft' fills slots instead of choosing experts; use acmoe.SoftMoE",
        )

    def forward(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        cache: LayerCache | None = None,
        source: Tensor | None = None,
        lowered: Tensor | None = None,
    ) -> tuple[Tensor, RoutingState]:
        """x (T, D), or (B, L, D) where statistics are kept per sequence; y has x's shape.

        `source`, shaped like x, is what the next router's statistics are taken of where its config
        asks for other tokens than x (`gain`, `read`). `lowered` is x in the precision that experts
        multiply in, where the caller has it.
        """
        check_dim(x, self.dim)
        check_token_mask(x, token_mask)
        slots = cache or LayerCache(None, None)
        x = blank(x, token_mask)
        with without_autocast(x):
            routing, expert_input = self.router.route(
                x, state, token_mask=token_mask, token_ids=token_ids, cache=slots.router
            )
        mask_T = None if token_mask is None else token_mask.reshape(-1)
        sent = routing
        if mask_T is not None:
            # Padding goes to no expert: it costs nothing, and changes no rounding of a product.
            nowhere = routing.expert_ids.masked_fill(~mask_T[:, None], self.num_experts)
            sent = routing._replace(expert_ids=nowhere)
        if self.capacity_factor is not None:
            sent = limit_capacity(sent, self.num_experts, self.top_k, self.capacity_factor, mask_T)
        if lowered is not None and token_mask is None and not self.router.scale_experts:
            expert_input = lowered
        input_TD = expert_input.reshape(-1, self.dim)
        complete = self.capacity_factor is None and token_mask is None and self.router.always_k
        order = self.experts.order(
            input_TD,
            sent.expert_ids,
            complete=complete,
            assignment_T1=self.emitter.sorted_by(routing),
            token_mask_T=mask_T,
        )
        with without_autocast(x):
            emitted = self.emitter(
                *(x, routing, state),
                token_mask=token_mask,
                slot=slots.emit,
                source=source,
                clusters=None if order is None else order.clusters,
            )
        y_TD = self.experts.mix(
            input_TD, sent.expert_ids, sent.gate, complete=complete, order=order
        )
        return blank(y_TD.view(x.shape), token_mask), emitted

    def new_cache(
        self,
        num_sequences: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> LayerCache:
        """Decode slots of this layer, empty where its statistics need none (`running`)."""
        return LayerCache(
            self.router.new_slot(num_sequences, device=device, dtype=dtype),
            self.emitter.new_slot(num_sequences, device=device, dtype=dtype),
        )
