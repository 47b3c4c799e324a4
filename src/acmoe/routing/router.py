"""The interface of all routers.

T tokens, D features.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acmoe.config.model_checks import check_top_k
from acmoe.config.routing import LossConfig
from acmoe.errors import UserError, check
from acmoe.ops.checks import check_dim, check_range, check_token_mask, check_whole
from acmoe.ops.precision import without_autocast
from acmoe.ops.route import ScaledTokens
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.saved_names import rename_for_base
from acmoe.routing.state import Routing, RoutingState, check_num_tokens, check_routing_of
from acmoe.routing.statistics.cache import StatisticsSlot
from acmoe.routing.statistics.registry import Layer

if TYPE_CHECKING:
    from acmoe.routing.next_state import NextState


class Router(Layer):
    """Computes a `Routing` from hidden states, in two steps.

    `rescale` rescales the tokens (in adaptive routers only), `route` chooses experts for them. A
    new router must define `decide`, which is `route` for a plain tensor.
    """

    causal = True  # True: a token's choice does not depend on later tokens or other sequences
    always_k = True  # True: every token gets exactly k experts
    scale_experts = False  # True: the experts read the rescaled tokens too
    mix = 1  # number of clusters per token that this router reads from the state
    # True: its statistics of a stream continue from one segment to the next (`CarriedMoments`)
    carries_moments = False

    def __init__(
        self, *, dim: int, num_experts: int, top_k: int, losses: LossConfig | None = None
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("num_experts", num_experts), ("top_k", top_k)):
            check_whole(value, name)
        check_top_k(top_k, num_experts)
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = top_k
        check_losses(losses)
        self.losses = losses or LossConfig()
        # Name of the processes whose tokens the balance loss of training is over. An attribute of
        # the instance from the start: torch.compile would trace again where it appears later.
        self.balance_group = ""
        # Computes the state for the next layer where no `acmoe.MoE` does (`build_router`).
        self.next_layer: NextState | None = None
        self.register_load_state_dict_pre_hook(rename_for_base)  # type: ignore[no-untyped-call]

    def forward(
        self,
        x: Tensor | ScaledTokens,
        state: RoutingState | None = None,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> Routing:
        """Route x (T, D) or (B, L, D); all results are flat, T = B * L.

        state: from the layer before; None in the first layer. A router that rescales tokens calls
        its base router with the `ScaledTokens`, so that hooks on the base see its call.
        """
        if isinstance(x, ScaledTokens):
            return self.route(x, token_mask=token_mask, token_ids=token_ids)
        if self.next_layer is not None:  # no MoE layer is around it, which would count the state
            self.count_alone(state)
        state = self.state_for(x, state)
        check_token_mask(x, token_mask)
        x = blank(x, token_mask)
        with without_autocast(x):
            tokens = self.rescale(x, state, token_mask=token_mask, cache=cache)
            routing = self.route(tokens, token_mask=token_mask, token_ids=token_ids)
            if self.scale_experts:
                routing = routing._replace(expert_input=tokens.dense(x.dtype))
        return routing

    def count_alone(self, state: RoutingState | None) -> None:
        """Count a call of a router without an MoE layer around it, if it needs a state."""

    @property
    def loss_group(self) -> str:
        """Return the name of the process group over whose tokens the balance loss is computed.

        "" stands for this process alone. An evaluation takes its own tokens, so that one process
        may evaluate while the others wait.
        """
        return self.balance_group if self.training else ""

    def state_for(self, x: Tensor, state: RoutingState | None) -> RoutingState:
        """Check x; return the state, or the identity where no layer came before."""
        if not isinstance(x, Tensor):
            raise UserError(_not_a_tensor(x))
        if not x.is_floating_point():
            raise UserError(f"x has dtype {x.dtype}; pass floating-point hidden states")
        if x.is_nested or x.layout != torch.strided or x.element_size() < 2:
            raise UserError(_not_dense(x))
        check_dim(x, self.dim)
        if isinstance(state, RoutingState):
            return state
        if state is not None:
            raise UserError(
                f"state is a {type(state).__name__}; pass the RoutingState of the layer before, "
                "acmoe.RoutingState(*tensors) if you took it apart, or None in the first layer"
            )
        return RoutingState.before(x, num_clusters=self.num_experts, mix=self.mix)

    def next_state(
        self,
        x: Tensor,
        routing: Routing,
        state: RoutingState | None = None,
        *,
        token_mask: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> RoutingState:
        """Return the state for the router of the next layer, from this one's input and decision.

        It is for a router used alone, over experts of your own; `acmoe.MoE` returns its state.

        >>> from acmoe import build_router
        >>> sizes = {"dim": 8, "num_experts": 4, "top_k": 2}
        >>> first, second = (build_router("adaptive", **sizes, standalone=True) for _ in range(2))
        >>> x = torch.randn(5, 8)
        >>> state = first.next_state(x, first(x))
        >>> second(x, state).expert_ids.shape
        torch.Size([5, 2])
        """
        if self.next_layer is None:
            raise UserError(
                "this router was built without statistics for a next layer; build it with "
                "acmoe.build_router(..., standalone=True), or use the state that its acmoe.MoE "
                "returns"
            )
        state = self.state_for(x, state)
        check_num_tokens(state, x)
        check_routing_of(x, routing)
        check_token_mask(x, token_mask)
        x = blank(x, token_mask)
        found: RoutingState = self.next_layer(x, routing, state, token_mask=token_mask, slot=cache)
        return found

    def rescale(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> ScaledTokens:
        """Return the tokens as this router reads them: x itself, except in adaptive routers."""
        check_num_tokens(state, x)
        return ScaledTokens(x)

    def route(
        self,
        tokens: ScaledTokens,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Routing:
        """Choose experts for the rescaled tokens."""
        x = tokens.dense()
        routing = self.decide(x, token_mask=token_mask, token_ids=token_ids)
        check_routing(self, routing, x.numel() // self.dim)
        return routing

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Choose experts for float32 tokens x, which have the shape that `forward` received."""
        raise NotImplementedError(f"{type(self).__name__} must define decide")

    def new_slot(
        self, num_sequences: int, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> StatisticsSlot | None:
        """Return a cache for statistics between decode steps; None if the router needs none."""
        return None


def unwrapped(router: nn.Module) -> Any:
    """Return the router inside of wrappers that hide its attributes: LoRA on its weight (PEFT)."""
    while not isinstance(router, Router) and "base_layer" in router._modules:
        router = router.get_submodule("base_layer")
    return router


def blank(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """Set padding to zero, so that its content reaches neither a sum nor a gradient."""
    return x if token_mask is None else x.masked_fill(~token_mask[..., None], 0.0)


def flat(x: Tensor) -> Tensor:
    """Return x as (T, D) in float32 (or float64): routers do not decide in low precision."""
    return x.reshape(-1, x.shape[-1]).to(accumulation_dtype(x.dtype))


def flat_mask(token_mask: Tensor | None) -> Tensor | None:
    """Return the mask as (T,), or None, which means that no token is padding."""
    return None if token_mask is None else token_mask.reshape(-1)


def real_tokens(value_TX: Tensor, token_mask_T: Tensor | None) -> Tensor:
    """Return the float64 number of tokens that are not padding, without a device sync."""
    if token_mask_T is not None:
        return token_mask_T.sum(dtype=torch.float64)
    return value_TX.new_full((), value_TX.shape[0], dtype=torch.float64)


def rows_for(rows: Callable[[int], float], value_TX: Tensor, token_mask_T: Tensor | None) -> Tensor:
    """Return () the floor of rows(n), n the number of real tokens, without float64 on the device.

    `rows` computes in Python. Where n is known to the device alone, which counts the mask, the
    result is looked up in a table of all n.
    """
    tokens, most = value_TX.shape[0], 2.0**62  # infinite rows fit no int64
    if token_mask_T is None:
        return value_TX.new_full((), int(min(rows(tokens), most)), dtype=torch.int64)
    table = [int(min(rows(count), most)) for count in range(tokens + 1)]
    return torch.tensor(table, device=value_TX.device)[token_mask_T.sum()]


def check_routing(router: Router, routing: object, num_tokens: int) -> None:
    """Raise a UserError if `decide`, which a user may have written, did not return a `Routing`."""
    if torch.compiler.is_compiling():
        return
    name, T, E = type(router).__name__, num_tokens, router.num_experts
    if not isinstance(routing, Routing):
        raise UserError(f"{name}.decide returned a {type(routing).__name__}; return acmoe.Routing")
    K = router.top_k if router.always_k else routing.expert_ids.shape[-1]
    shapes = {"expert_ids": (T, K), "gate": (T, K), "affinity": (T, E), "first": (T,), "loss": ()}
    for field, shape in shapes.items():
        found = tuple(getattr(getattr(routing, field), "shape", ()))
        check(
            found == shape or (field == "first" and routing.first is None),
            f"{name}.decide returned {field} of shape {found}; return {shape} for {T} tokens, {E} "
            f"experts and top_k={router.top_k}, or set always_k = False to choose another number",
        )
    check(
        routing.loss is not None,
        f"{name}.decide returned loss=None; return affinity.new_zeros(()) where there is none",
    )
    check(
        routing.expert_ids.dtype in (torch.int32, torch.int64),
        f"{name}.decide returned expert_ids of {routing.expert_ids.dtype}; return whole numbers",
    )
    check_range(routing.expert_ids, 0, E if router.always_k else E + 1, f"{name}: expert_ids")


def _not_a_tensor(x: object) -> str:
    """Return the message for hidden states that are no tensor."""
    if not isinstance(x, tuple):
        return f"x is a {type(x).__name__}; pass a torch tensor of hidden states"
    return (
        "x is a tuple; pass the hidden states alone: an acmoe.MoE returns y and a state, which "
        "acmoe.MoEStack hands on and nn.Sequential does not"
    )


def _not_dense(x: Tensor) -> str:
    """Return the message for hidden states of a form that no layer computes with."""
    if x.is_nested:
        return (
            "x is a nested tensor; pass x.to_padded_tensor(0.0) and a token_mask that is True for "
            "its real tokens"
        )
    if x.layout != torch.strided:
        return f"x has layout {x.layout}; pass x.to_dense()"
    return f"x has dtype {x.dtype}; pass hidden states of 16 bits or more"


def need_token_ids(token_ids: Tensor | None, x: Tensor, router: str) -> Tensor:
    check(
        token_ids is not None and token_ids.numel() * x.shape[-1] == x.numel(),
        f"router={router!r} routes by token id; pass token_ids with one id per token of x "
        f"{tuple(x.shape[:-1])}",
    )
    assert token_ids is not None
    check(
        not (token_ids.is_floating_point() or token_ids.is_complex()),
        f"token_ids has dtype {token_ids.dtype}; router={router!r} takes whole numbers",
    )
    return token_ids.reshape(-1).long()  # a product of narrower ids could overflow


def check_losses(losses: object) -> None:
    check(
        losses is None or isinstance(losses, LossConfig),
        f"losses={losses!r}; pass acmoe.LossConfig(...), or None for its defaults",
    )
