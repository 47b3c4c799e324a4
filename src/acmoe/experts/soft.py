"""SoftMoE: experts read slots, which are convex combinations of a sequence's tokens.

B sequences of L tokens, D features, E experts, P slots per expert, S = E * P slots.
"""

from typing import Any

from torch import Tensor

from acmoe.config.routing import AdaptiveConfig, RandomConfig, SoftConfig
from acmoe.errors import check
from acmoe.experts.mlp import ExpertMLP, shaped_as
from acmoe.experts.old_names import NOT_GIVEN, rename_emitter, renamed_emit
from acmoe.ops.checks import check_token_mask
from acmoe.ops.precision import without_autocast
from acmoe.routing.build import build_router
from acmoe.routing.next_state import SAME_ROUTER, NextState
from acmoe.routing.rescaling import count_state
from acmoe.routing.router import blank
from acmoe.routing.soft import SoftRouter, as_one_sequence
from acmoe.routing.state import RoutingState
from acmoe.routing.statistics.registry import Layer


class SoftMoE(Layer):
    """Soft mixture of experts, plain or adaptive: (x, state) -> (y, state).

    With an adaptive router, tokens are rescaled for the slot logits only; slots are combinations of
    the tokens themselves. A cluster holds the tokens with the same expert of largest combine weight
    at the previous SoftMoE layer. A token's scale is the weighted sum of those of its `mix` best
    clusters (8 in the paper).

    The arguments are those of `acmoe.MoE`. `router` is "soft", `SoftConfig(slots_per_expert=...)`
    or, for the paper's adaptive layer, `AdaptiveConfig(base=SoftConfig(), mix=8)`.

    The layer calls methods of its router, not the router itself: hooks on the router do not run.
    Those on the layer, on `experts` and on `next_state` do.
    """

    def __init__(
        self,
        *,
        dim: int,
        hidden: int,
        num_experts: int,
        router: str | SoftConfig | AdaptiveConfig | RandomConfig = "soft",
        next_router: AdaptiveConfig | RandomConfig | str | None = SAME_ROUTER,
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        emit: Any = NOT_GIVEN,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.num_experts = num_experts
        self.router = build_router(router, dim=dim, num_experts=num_experts, top_k=1)
        check(
            isinstance(self.base, SoftRouter),
            f"router={router!r} chooses experts; SoftMoE takes 'soft', SoftConfig(...) or "
            "AdaptiveConfig(base=SoftConfig(), mix=8)",
        )
        self.next_state = NextState.after(self.router, renamed_emit(next_router, emit))
        self.register_load_state_dict_pre_hook(rename_emitter)  # type: ignore[no-untyped-call]
        self.experts = ExpertMLP(
            dim=dim,
            hidden=hidden,
            num_experts=num_experts,
            activation=activation,
            bias=bias,
            dropout=dropout,
        )

    @property
    def base(self) -> SoftRouter:
        """Return the router without rescaling. As an attribute it would be saved twice."""
        base: SoftRouter = getattr(self.router, "base", self.router)  # type: ignore[arg-type]
        return base

    def forward(
        self, x: Tensor, state: RoutingState | None = None, *, token_mask: Tensor | None = None
    ) -> tuple[Tensor, RoutingState]:
        """Return y, shaped as x, and the next state; x is (B, L, D), or (T, D) for one sequence.

        state: from the SoftMoE layer before; None in the first one.
        """
        count_state(self.router, state)
        state = self.router.state_for(x, state)
        check_token_mask(x, token_mask)
        x_BLD, mask_BL = (x, token_mask) if x.dim() == 3 else as_one_sequence(x, token_mask)
        x_BLD = blank(x_BLD, mask_BL)
        with without_autocast(x):
            scaled_BLD = self.router.rescale(x_BLD, state, token_mask=mask_BL).dense()
            soft = self.base.mixtures(scaled_BLD, mask_BL)
            state = self.next_state(x_BLD, soft.routing, state, token_mask=mask_BL)
        input_BLD = scaled_BLD.to(x.dtype) if self.router.scale_experts else x_BLD
        slot_BSD = soft.dispatch.to(x.dtype).mT @ input_BLD
        out_BSD = self.run_experts(slot_BSD)
        y_BLD = blank(soft.combine.to(x.dtype) @ out_BSD, mask_BL)
        return shaped_as(x, y_BLD), state

    def run_experts(self, slot_BSD: Tensor) -> Tensor:
        """Return the experts' outputs (B, S, D); each expert reads its own P slots."""
        B, S, D = slot_BSD.shape
        per_expert = S // self.num_experts
        slot_EBPD = slot_BSD.view(B, self.num_experts, per_expert, D).transpose(0, 1)
        out_END: Tensor = self.experts(slot_EBPD.reshape(self.num_experts, B * per_expert, D))
        return out_END.view(slot_EBPD.shape).transpose(0, 1).reshape(B, S, D)
