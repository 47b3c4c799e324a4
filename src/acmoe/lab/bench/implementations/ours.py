"""Build this library's layer for the benchmarks, with a chosen backend.

T tokens, D features, E experts.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from acmoe.config.routing import LossConfig, RouterConfig
from acmoe.experts.moe import MoE
from acmoe.lab.bench.implementations.weights import Weights
from acmoe.lab.bench.shapes import Shape
from acmoe.ops import device_support
from acmoe.ops.dispatch import use_backend
from acmoe.ops.experts.op import sonicmoe_lacks
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.origin import new_origin, origin_codes
from acmoe.routing.state import RoutingState


def new_moe(shape: Shape, router: str | RouterConfig, losses: LossConfig | None = None) -> MoE:
    """Build a layer of this shape with weights of its own, on torch's default device."""
    return MoE(
        dim=shape.dim,
        hidden=shape.hidden,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        router=router,
        activation=shape.activation,
        bias=shape.bias,
        losses=losses,
    )


def build_moe(shape: Shape, weights: Weights, router: str | RouterConfig = "smoe") -> MoE:
    """Build the layer around the given weights, without auxiliary loss, as baselines have none."""
    with torch.device(weights.up.device):
        moe = new_moe(shape, router, LossConfig(balance=0.0))
    gate = moe.router.base if isinstance(moe.router, AdaptiveRouter) else moe.router
    gate.embedding = weights.embedding
    moe.experts.up, moe.experts.down = weights.up, weights.down
    moe.experts.up_bias, moe.experts.down_bias = weights.up_bias, weights.down_bias
    return moe


def plain_state(shape: Shape, device: torch.device) -> RoutingState:
    """Return the state that a plain layer passes on, for layers that follow another.

    The layer hands its tensors on. From a state made by hand, and in the first layer of a model, it
    makes new ones: in float32 as many numbers as the router has weights.
    """
    state = RoutingState.identity(
        num_tokens=shape.tokens, num_clusters=shape.num_experts, dim=shape.dim, device=device
    )
    return state._replace(origin=new_origin(origin_codes(None), state.assignment))


def build_ours(shape: Shape, weights: Weights, backend: str) -> Callable[[Tensor], Tensor]:
    moe = build_moe(shape, weights)
    state = plain_state(shape, weights.up.device)

    def layer(x_TD: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return moe(x_TD, state)[0]  # type: ignore[no-any-return]
        with use_backend(backend):
            return moe(x_TD, state)[0]  # type: ignore[no-any-return]

    return layer


def triton_unsupported(shape: Shape, x: Tensor) -> str | None:
    return device_support.triton_unsupported(x)


def sonicmoe_unsupported(shape: Shape, x: Tensor) -> str | None:
    return sonicmoe_lacks(x, shape.activation, shape.bias, 0.0)
