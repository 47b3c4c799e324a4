"""Optimizers that step in gradient hooks, inside the backward: statistics move at its end.

T tokens, D features, C clusters.
"""

import copy
import gc
import itertools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from acmoe import AdaptiveConfig, MetricConfig, MoE, RoutingState, SMoEConfig
from slow_cases import mostly_slow

T, D, C = 30, 4, 3
ROUTERS = {
    "running": AdaptiveConfig(momentum=0.0, statistics_of="current"),
    "prefix": AdaptiveConfig(momentum=0.0, statistics="prefix"),
    "metric": MetricConfig(momentum=0.0),
    "loss-free": SMoEConfig(bias_balancing=0.2),
}


class Blocks(nn.Module):
    """Blocks of an MoE layer and a linear one; with `replay` the backward repeats each."""

    def __init__(self, router: str, *, replay: bool, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"dim": D, "hidden": 8, "num_experts": C, "top_k": 1}
        self.layers = nn.ModuleList(MoE(**sizes, router=ROUTERS[router]) for _ in range(count))
        self.adapters = nn.ModuleList(nn.Linear(D, D) for _ in range(count))
        self.replay = replay

    def block(self, index: int, x: Tensor, state: RoutingState | None) -> tuple[Tensor, ...]:
        y, state = self.layers[index](x, state)
        return x + self.adapters[index](y), state

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for index in range(len(self.layers)):
            if self.replay:
                x, state = checkpoint(self.block, index, x, state, use_reentrant=False)
            else:
                x, state = self.block(index, x, state)
        return x.square().mean()


def batch(number: int) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(T, D, generator=draw) * (1 + 5 * torch.rand(D, generator=draw))


def step_in_hooks(parameters: list[nn.Parameter], lr: float) -> dict[nn.Parameter, list[Tensor]]:
    """Give each parameter an optimizer that steps as soon as its gradient is there."""
    gradients: dict[nn.Parameter, list[Tensor]] = {one: [] for one in parameters}

    def hook_of(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradients[parameter].append(parameter.grad.clone())  # type: ignore[index]
            optimizer.step()
            optimizer.zero_grad()

        return hook

    for one in parameters:
        one.register_post_accumulate_grad_hook(hook_of(torch.optim.SGD([one], lr=lr)))
    return gradients


# Each router once, half of them with blocks that the backward repeats.
@mostly_slow(("router", "replay"), itertools.product(ROUTERS, (False, True)), keep={0, 3, 5, 6})
def test_steps_inside_the_backward_are_one_step_after_it(router: str, replay: bool) -> None:
    inside, after = Blocks(router, replay=replay), Blocks(router, replay=replay)
    step_in_hooks(list(inside.parameters()), lr=0.1)
    optimizer = torch.optim.SGD(after.parameters(), lr=0.1)
    start = copy.deepcopy(after.state_dict())
    for number in range(3):
        inside(batch(number)).backward()
        after(batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for key, value in after.state_dict().items():
        assert torch.equal(inside.state_dict()[key], value), key
    moved = [key for key in start if key.endswith(("statistics.weight", "selection.bias"))]
    assert any(not torch.equal(after.state_dict()[key], start[key]) for key in moved)


def test_one_search_finds_the_optimizers_of_all_parameters() -> None:
    """None of them has stepped before; to search all objects of a process takes about 0.1 s."""
    blocks = Blocks("running", replay=False)
    step_in_hooks(list(blocks.parameters()), lr=0.1)
    with mock.patch("gc.get_referrers", wraps=gc.get_referrers) as searches:
        for number in range(2):
            blocks(batch(number)).backward()
    assert searches.call_count == 1


@mostly_slow("router", ROUTERS, keep={0, 3})  # the test above repeats blocks of the others
def test_a_repeated_block_reads_the_statistics_of_its_forward(router: str) -> None:
    """A step of any optimizer moves the statistics of frozen layers, also of those below."""
    gradients = []
    for replay in (False, True):
        blocks = Blocks(router, replay=replay)
        blocks.layers.requires_grad_(False)
        found = step_in_hooks(list(blocks.adapters.parameters()), lr=0.0)
        for number in range(3):
            blocks(batch(number)).backward()
        gradients.append([torch.stack(each) for each in found.values()])
    for plain, replayed in zip(*gradients, strict=True):
        assert torch.equal(plain, replayed)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # compiled autograd's
def test_steps_inside_a_compiled_backward_are_one_step_after_it() -> None:
    """Compiled autograd drops callbacks for the end of a backward that it has not traced.

    It traces the hook of each parameter, for seconds: two blocks train their routers alone.
    """
    torch.compiler.reset()
    inside, after = (Blocks("running", replay=False, count=2) for _ in range(2))
    for blocks in (inside, after):
        blocks.requires_grad_(False)
        for layer in blocks.layers:
            layer.router.requires_grad_(True)
    step_in_hooks([one for one in inside.parameters() if one.requires_grad], lr=0.1)
    optimizer = torch.optim.SGD([one for one in after.parameters() if one.requires_grad], lr=0.1)
    for number in range(2):
        with compiled_autograd._enable(torch.compile(backend="eager")):
            inside(batch(number)).backward()
        after(batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for key, value in after.state_dict().items():
        torch.testing.assert_close(inside.state_dict()[key], value, msg=key)
    assert any(value.any() for key, value in after.state_dict().items() if "statistics.w" in key)
    torch.compiler.reset()
