"""A layer computes where its tokens are, whatever the default device is."""

import pytest
import torch

from acmoe import AdaptiveConfig, MoE, SMoEConfig
from acmoe.config.routing import RouterConfig

ROUTERS: dict[str, str | RouterConfig] = {
    "smoe": SMoEConfig(bias_balancing=0.1),
    "running": "adaptive",
    "batch": AdaptiveConfig(statistics="batch"),
    "prefix": AdaptiveConfig(statistics="prefix"),
    "metric": "metric",
    "expert-choice": "expert-choice",
}


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_a_default_device_of_another_kind_changes_no_result(
    router: str | RouterConfig, capacity: float | None
) -> None:
    """On the meta device torch summed uninitialised memory, without an error."""
    torch.manual_seed(0)
    sizes = {"dim": 8, "hidden": 12, "num_experts": 4, "top_k": 2}
    layers = [MoE(**sizes, router=router, capacity_factor=capacity) for _ in range(2)]  # type: ignore[arg-type]
    x = torch.randn(2, 20, 8, requires_grad=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        h, state = x, None
        for layer in layers:
            y, state = layer(h, state)
            h = h + y
        assert state is not None
        parameters = [one for layer in layers for one in layer.parameters()]
        loss = h.square().mean() + state.aux_loss
        return (h, *torch.autograd.grad(loss, [x, *parameters], allow_unused=True))

    expected = gradients()
    torch.set_default_device("meta")
    try:
        found = gradients()
    finally:
        torch.set_default_device(None)
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.allclose(one, other, atol=1e-6)
