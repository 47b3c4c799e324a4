"""The one protocol of all routers.

T tokens, D features.
"""

import torch
from torch import Tensor, nn

from acmoe.config.routing import LossConfig
from acmoe.errors import check
from acmoe.ops.checks import check_dim, check_token_mask
from acmoe.ops.precision import without_autocast
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.cache import StatisticsSlot
from acmoe.routing.state import Routing, RoutingState


class Router(nn.Module):
    """Hidden states -> `Routing`, in two steps.

    `rescale` moves the tokens into the space they are routed in (only adaptive routers do),
    `decide` chooses experts there. A new router writes `decide`.
    """

    causal = True  # a token's choice does not depend on later tokens or other sequences
    always_k = True  # every token gets exactly k experts
    scale_experts = False  # the experts read the rescaled tokens too
    mix = 1  # clusters per token this router reads from the state

    def __init__(
        self, *, dim: int, num_experts: int, top_k: int, losses: LossConfig | None = None
    ) -> None:
        super().__init__()
        check(dim >= 1, f"dim={dim}; it must be at least 1")
        check(num_experts >= 1, f"num_experts={num_experts}; it must be at least 1")
        check(top_k >= 1, f"top_k={top_k}; it must be at least 1")
        check(
            top_k <= num_experts,
            f"top_k={top_k} exceeds num_experts={num_experts}; lower top_k",
        )
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.losses = losses or LossConfig()

    def forward(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> Routing:
        """Route x (T, D) or (B, L, D); all results are flat, T = B * L."""
        check_dim(x, self.dim)
        check_token_mask(x, token_mask)
        x = blank(x, token_mask)
        with without_autocast(x):
            return self.route(x, state, token_mask=token_mask, token_ids=token_ids, cache=cache)[0]

    def route(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> tuple[Routing, Tensor]:
        """The decision, and the tokens the experts read. A kernel may do both steps at once."""
        scaled = self.rescale(x, state, token_mask=token_mask, cache=cache)
        routing = self.decide(scaled, token_mask=token_mask, token_ids=token_ids)
        return routing, scaled.to(x.dtype) if self.scale_experts else x

    def rescale(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> Tensor:
        return x

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        raise NotImplementedError(f"{type(self).__name__} must define decide")

    def new_slot(
        self, num_sequences: int, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> StatisticsSlot | None:
        """What this router must remember between decode steps; None: nothing."""
        return None


def blank(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """Zeros in place of padding, so that whatever it held reaches neither a sum nor a gradient."""
    return x if token_mask is None else x.masked_fill(~token_mask[..., None], 0.0)


def flat(x: Tensor) -> Tensor:
    """(T, D) in the accumulation dtype: routers decide in float32, whatever the model runs in."""
    return x.reshape(-1, x.shape[-1]).to(accumulation_dtype(x.dtype))


def real_tokens(value_TX: Tensor, token_mask_T: Tensor | None) -> Tensor:
    """() float64 number of tokens that are not padding, made on the device: no host waits."""
    if token_mask_T is not None:
        return token_mask_T.sum(dtype=torch.float64)
    return value_TX.new_full((), value_TX.shape[0], dtype=torch.float64)


def need_token_ids(token_ids: Tensor | None, x: Tensor, router: str) -> Tensor:
    check(
        token_ids is not None and token_ids.numel() * x.shape[-1] == x.numel(),
        f"router={router!r} routes by token id; pass token_ids with one id per token of x "
        f"{tuple(x.shape[:-1])}",
    )
    assert token_ids is not None
    return token_ids.reshape(-1)
