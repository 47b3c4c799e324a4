"""The number of experts per token, and the losses, may be changed after a layer is built."""

import pytest
import torch

from acmoe import AdaptiveConfig, LossConfig, MoE, SMoEConfig
from acmoe.config.routing import RouterConfig
from acmoe.errors import UserError

ROUTERS: dict[str, RouterConfig] = {
    "plain": SMoEConfig(),
    "running": AdaptiveConfig(),
    "batch": AdaptiveConfig(statistics="batch"),
    "nested": AdaptiveConfig(base=SMoEConfig(bias_balancing=0.1)),
}


def layers(router: RouterConfig, top_k: int, losses: LossConfig | None = None) -> list[MoE]:
    torch.manual_seed(0)
    return [
        MoE(
            dim=6,
            hidden=8,
            num_experts=4,
            top_k=top_k,
            router=router,
            losses=losses,
            capacity_factor=1.0,
        )
        for _ in range(2)
    ]


def outputs(stack: list[MoE]) -> tuple[torch.Tensor, torch.Tensor]:
    x, state = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)), None
    for layer in stack:
        y, state = layer(x, state)
        x = x + y
    assert state is not None
    return x, state.aux_loss


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_a_layer_whose_top_k_was_set_is_one_that_was_built_with_it(router: RouterConfig) -> None:
    of_layer, of_router = layers(router, 3), layers(router, 3)
    before = outputs(layers(router, 3))
    for one, other in zip(of_layer, of_router, strict=True):
        one.top_k = 1
        other.router.top_k = 1
        assert (one.top_k, one.router.top_k, other.top_k) == (1, 1, 1)
    wanted = outputs(layers(router, 1))
    assert not torch.equal(before[0], wanted[0])
    for stack in (of_layer, of_router):
        for found, right in zip(outputs(stack), wanted, strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_losses_that_were_set_on_the_router_are_those_of_the_layer(router: RouterConfig) -> None:
    losses = LossConfig(balance=0.0, z=0.5)
    stack = layers(router, 2)
    for layer in stack:
        layer.router.losses = losses
        assert layer.router.losses == losses
    found, wanted = outputs(stack), outputs(layers(router, 2, losses))
    assert torch.equal(found[1], wanted[1])
    assert not torch.equal(found[1], outputs(layers(router, 2))[1])


@pytest.mark.parametrize("value", [0, 5, 1.5])
def test_a_top_k_that_no_layer_can_have_is_refused(value: float) -> None:
    layer = layers(AdaptiveConfig(), 2)[0]
    with pytest.raises(UserError, match=f"top_k={value}"):
        layer.top_k = value  # type: ignore[assignment]
    assert layer.top_k == 2
