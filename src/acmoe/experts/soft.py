"""SoftMoE: experts read slots, convex mixtures of a sequence's tokens. (x, state) -> (x, state).

B sequences of L tokens, D features, E experts, P slots per expert, S = E * P slots.
"""

from torch import Tensor, nn

from acmoe.config.routing import AdaptiveConfig, RandomConfig, SoftConfig
from acmoe.errors import check
from acmoe.experts.emit import AS_ROUTER, Emitter, resolve_emit
from acmoe.experts.mlp import ExpertMLP
from acmoe.ops.checks import check_dim, check_token_mask
from acmoe.ops.precision import without_autocast
from acmoe.routing.build import build_router
from acmoe.routing.router import blank
from acmoe.routing.soft import SoftRouter, as_one_sequence
from acmoe.routing.state import RoutingState


class SoftMoE(nn.Module):
    """Soft mixture of experts, plain or adaptive.

    Adaptive: a token's scale mixes those of its `mix` best clusters (8 in the paper), a cluster
    being the tokens whose output the same expert dominated at the previous SoftMoE layer. It enters
    the slot logits; slots are still made of the tokens themselves.
    """

    def __init__(
        self,
        *,
        dim: int,
        hidden: int,
        num_experts: int,
        router: str | SoftConfig | AdaptiveConfig | RandomConfig = "soft",
        emit: AdaptiveConfig | RandomConfig | str | None = AS_ROUTER,
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
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
        self.emitter = Emitter(resolve_emit(emit, self.router), num_clusters=num_experts, dim=dim)
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
        """The router without its scale. Not an attribute: it would be saved a second time."""
        base: SoftRouter = getattr(self.router, "base", self.router)  # type: ignore[arg-type]
        return base

    def forward(
        self, x: Tensor, state: RoutingState, *, token_mask: Tensor | None = None
    ) -> tuple[Tensor, RoutingState]:
        """x (B, L, D), or (T, D) for one sequence; y has x's shape."""
        check_dim(x, self.dim)
        check_token_mask(x, token_mask)
        x_BLD, mask_BL = (x, token_mask) if x.dim() == 3 else as_one_sequence(x, token_mask)
        x_BLD = blank(x_BLD, mask_BL)
        with without_autocast(x):
            scaled_BLD = self.router.rescale(x_BLD, state, token_mask=mask_BL)
            soft = self.base.mixtures(scaled_BLD, mask_BL)
            emitted = self.emitter(x_BLD, soft.routing, state, token_mask=mask_BL)
        source_BLD = scaled_BLD.to(x.dtype) if self.router.scale_experts else x_BLD
        slot_BSD = soft.dispatch.to(x.dtype).mT @ source_BLD
        back_BSD = self.run_experts(slot_BSD)
        y_BLD = blank(soft.combine.to(x.dtype) @ back_BSD, mask_BL)
        return y_BLD.view(x.shape), emitted

    def run_experts(self, slot_BSD: Tensor) -> Tensor:
        B, S, D = slot_BSD.shape
        per_expert = S // self.num_experts
        slot_EBPD = slot_BSD.view(B, self.num_experts, per_expert, D).transpose(0, 1)
        out_END = self.experts.even(slot_EBPD.reshape(self.num_experts, B * per_expert, D))
        return out_END.view(slot_EBPD.shape).transpose(0, 1).reshape(B, S, D)
