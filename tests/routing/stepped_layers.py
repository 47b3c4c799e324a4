"""A small adaptive layer, and the optimizer steps that move its running statistics.

T tokens, D features, C clusters.
"""

from typing import Any

import torch
from torch import Tensor, nn

from acmoe import AdaptiveConfig, MoE, RoutingState
from acmoe.routing.statistics import ClusterStatistics

T = 12
D = 4
C = 3
MOMENTUM = 0.8
START = RoutingState.identity(num_tokens=T, num_clusters=C, dim=D)


def layer(seed: int = 0, **options: Any) -> MoE:
    torch.manual_seed(seed)
    config = AdaptiveConfig(momentum=MOMENTUM, **options)
    return MoE(dim=D, hidden=8, num_experts=C, top_k=2, router=config)


def tokens(seed: int) -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(seed))


def statistics_of(moe: MoE) -> ClusterStatistics:
    assert moe.next_state.statistics is not None
    return moe.next_state.statistics


def loss_of(moe: nn.Module, x: Tensor) -> Tensor:
    y, state = moe(x, START)
    loss: Tensor = y.square().mean() + state.aux_loss
    return loss


def train(moe: MoE, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    """Take one optimizer step of as many micro-batches as there are seeds."""
    for seed in seeds:
        loss_of(moe, tokens(seed)).backward()
    optimizer.step()
    optimizer.zero_grad()


def averages(moe: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in moe.state_dict().items() if "statistics" in key}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        assert torch.equal(value, wanted[key]), key


def moved(moe: MoE) -> float:
    """The number of tokens in the average, discounted by momentum."""
    return statistics_of(moe).weight.sum().item()


class Adapted(nn.Module):
    """A frozen MoE layer with a trained projection behind it, as adapters have it."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = layer().requires_grad_(False)
        self.adapter = nn.Linear(D, D)
