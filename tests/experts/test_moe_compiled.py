"""`torch.compile(fullgraph=True)` takes the layers of every router, in training and evaluation."""

import copy

import pytest
import torch
from torch import Tensor, nn

from acmoe import (
    AdaptiveConfig,
    MoE,
    SoftMoE,
    StableConfig,
    ThresholdConfig,
    override_statistics,
)
from acmoe.config.routing import ROUTERS, ExpertChoiceConfig, RouterConfig
from slow_cases import mostly_slow

# The compiler itself makes an instance of a torch.autograd.Function while it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

BY_NAME: dict[str, str | RouterConfig] = {name: name for name in ROUTERS}
ALL = BY_NAME | {
    "stable": StableConfig(vocab_size=32),  # by name it needs its vocabulary
    "threshold, learned": ThresholdConfig(learnable=True),
    "adaptive, prefix": AdaptiveConfig(statistics="prefix"),
    "adaptive, batch, two clusters": AdaptiveConfig(statistics="batch", mix=2),
    "adaptive expert choice": AdaptiveConfig(base=ExpertChoiceConfig()),
}


class Two(nn.Module):
    """Two layers with a residual between them."""

    def __init__(self, router: str | RouterConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"dim": 6, "hidden": 8, "num_experts": 4}
        soft = router == "soft"
        options = {} if soft else {"top_k": 2, "router": router}
        kind = SoftMoE if soft else MoE
        self.first, self.second = (kind(**sizes, **options) for _ in range(2))  # type: ignore[arg-type]
        self.reads_ids = not soft

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        named = {"token_ids": ids} if self.reads_ids else {}
        y, state = self.first(x, **named)
        z, state = self.second(x + y, state, **named)
        return x + y + z, state.aux_loss


def results(layers: Two, call: nn.Module) -> list[Tensor]:
    """Return outputs, gradients and buffers of two updates of other sizes, then of an evaluation.

    The evaluation reads what the updates made of the running statistics.
    """
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    found = []
    for length in (5, 7):
        generator = torch.Generator().manual_seed(length)
        x = torch.randn(2, length, 6, generator=generator).requires_grad_()
        ids = torch.randint(32, (2, length), generator=generator)
        torch.manual_seed(0)  # the random scale
        y, aux_loss = call(x, ids)
        optimizer.zero_grad()
        (y.square().sum() + aux_loss).backward()
        grads = [one.grad for one in layers.parameters() if one.grad is not None]
        found += [y.detach(), aux_loss.detach(), x.grad, *(one.clone() for one in grads)]
        optimizer.step()
    layers.eval()
    with torch.no_grad():
        found += [*call(x, ids), *layers.buffers()]
    return found


@mostly_slow("name", ALL, keep=[list(ALL).index("expert-choice")])
def test_a_router_is_one_graph(name: str) -> None:
    torch._dynamo.reset()
    layer = Two(ALL[name]).first
    x, ids = torch.randn(1, 5, 6), torch.arange(5)[None]
    named = {} if name == "soft" else {"token_ids": ids}
    compiled = torch.compile(layer.router, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, **named).gate, layer.router(x, **named).gate)


def test_a_copy_that_nobody_called_before_is_one_graph() -> None:
    torch._dynamo.reset()
    layers = copy.deepcopy(Two(ALL["adaptive"]))  # its config must have all that a trace reads
    x, ids = torch.randn(2, 5, 6), torch.randint(32, (2, 5))
    compiled = torch.compile(layers, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, ids)[0], layers(x, ids)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_two_compiled_updates_are_those_of_the_layers(name: str) -> None:
    torch._dynamo.reset()
    layers = Two(ALL[name])
    twin = copy.deepcopy(layers)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager", dynamic=True)
    # The optimizer of one steps while the other waits: it must not move the other's statistics.
    expected, found = results(layers, layers), results(twin, compiled)
    for mine, theirs in zip(found, expected, strict=True):  # the layers run kernels in C
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)


@mostly_slow("name", ["adaptive", "adaptive, prefix"])
def test_a_compiled_layer_takes_a_batch_without_tokens(name: str) -> None:
    torch._dynamo.reset()
    layers = Two(ALL[name])
    compiled = torch.compile(layers, fullgraph=True, backend="eager")
    y, aux_loss = compiled(torch.randn(2, 0, 6), torch.empty(2, 0, dtype=torch.int64))
    assert y.shape == (2, 0, 6) and aux_loss == 0


def test_a_strength_may_change_between_calls_of_a_compiled_layer() -> None:
    """From the second value on, torch.compile traces the number as a symbol."""
    torch._dynamo.reset()
    layers = Two(AdaptiveConfig(statistics="batch", strength=0.5)).eval()
    compiled = torch.compile(layers.second, fullgraph=True, backend="eager")
    x = torch.randn(2, 5, 6)
    for strength in (0.5, 0.7, 0.9):
        with override_statistics(layers, strength=strength):
            with torch.no_grad():
                state = layers.first(x)[1]
            torch.testing.assert_close(compiled(x, state)[0], layers.second(x, state)[0])
