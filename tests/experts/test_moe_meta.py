"""No decision reads a number on the host: all runs on the meta device, and with fake tensors.

T tokens, D features.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from acmoe import (
    AdaptiveConfig,
    CosineConfig,
    ExpertChoiceConfig,
    HashConfig,
    LossConfig,
    MoE,
    RandomConfig,
    RoutingState,
    SMoEConfig,
    SoftConfig,
    SoftMoE,
    StableConfig,
    ThresholdConfig,
    fold_statistics,
)
from slow_cases import mostly_slow

ROUTERS = {
    "smoe": SMoEConfig(bias=True, noise=1.0, bias_balancing=0.1),
    "cosine": CosineConfig(),
    "stable": StableConfig(vocab_size=10),
    "random": RandomConfig(),
    "threshold": ThresholdConfig(learnable=True),
    "hash": HashConfig(),
    "expert-choice": ExpertChoiceConfig(),
    "batch": AdaptiveConfig(statistics="batch"),
    "current": AdaptiveConfig(statistics="batch", statistics_of="current", detach=False),
    "running": AdaptiveConfig(mix=2),
    "prefix": AdaptiveConfig(statistics="prefix", mix=2),
    "sequence": AdaptiveConfig(statistics="sequence", measure="iqr"),
    "gini": AdaptiveConfig(statistics="batch", measure="gini"),
}


@mostly_slow("masked", [False, True], keep=(1,))
@pytest.mark.parametrize("name", ROUTERS)
def test_a_training_step_reads_no_number(name, masked):
    with torch.device("meta"):
        moe = MoE(
            dim=6,
            hidden=8,
            num_experts=4,
            top_k=2,
            router=ROUTERS[name],
            capacity_factor=1.25,
            losses=LossConfig(z=0.1),
        )
        x = torch.randn(3, 5, 6, requires_grad=True)
        ids = torch.zeros(3, 5, dtype=torch.int64)
        mask = torch.ones(3, 5, dtype=torch.bool) if masked else None
    state = RoutingState.identity(
        num_tokens=15, num_clusters=4, dim=6, mix=moe.router.mix, device="meta"
    )
    y, emitted = moe(x, state, token_ids=ids, token_mask=mask)
    if emitted.assignment.shape == state.assignment.shape:
        y, emitted = moe(y, emitted, token_ids=ids, token_mask=mask)
    (y.sum() + emitted.aux_loss).backward()
    fold_statistics(moe)
    assert y.shape == x.grad.shape == (3, 5, 6)
    assert all(value.is_meta for value in (y, x.grad, *emitted[:4]))


@pytest.mark.parametrize("router", [SoftConfig(), AdaptiveConfig(base=SoftConfig(), mix=2)])
def test_a_soft_layer_reads_no_number(router):
    with torch.device("meta"):
        moe = SoftMoE(dim=6, hidden=8, num_experts=4, router=router)
        x = torch.randn(3, 5, 6, requires_grad=True)
    state = RoutingState.identity(
        num_tokens=15, num_clusters=4, dim=6, mix=moe.router.mix, device="meta"
    )
    y, emitted = moe(x, state)
    y.sum().backward()
    fold_statistics(moe)
    assert y.shape == x.grad.shape == (3, 5, 6)
    assert all(value.is_meta for value in emitted[:4])


@mostly_slow(
    "router",
    [*ROUTERS.values(), AdaptiveConfig(strength=1.0)],
    keep=[*map(list(ROUTERS).index, ("smoe", "stable", "hash", "running", "prefix")), len(ROUTERS)],
    ids=[*ROUTERS, "strength"],
)
def test_layers_of_fake_tensors_train_and_evaluate(router):
    with FakeTensorMode():  # as tools that predict memory without computing a number
        layers = [MoE(dim=6, hidden=8, num_experts=4, top_k=2, router=router) for _ in range(2)]
        ids = torch.zeros(3, 5, dtype=torch.int64)
        for training in (True, False):
            x, state = torch.randn(3, 5, 6), None
            for moe in layers:
                x, state = moe.train(training)(x, state, token_ids=ids)
            (x.sum() + state.aux_loss).backward()
            torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.1).step()
    assert x.shape == (3, 5, 6)
    assert state.scale.shape == (4, 6)
