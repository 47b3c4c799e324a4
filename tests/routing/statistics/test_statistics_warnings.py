"""Layers whose running statistics nothing moves say so, once.

T tokens, C clusters.
"""

import logging
from functools import partial
from typing import Any, cast

import pytest
import torch
from stepped_layers import START, Adapted, C, D, T, layer, loss_of, statistics_of, tokens, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from acmoe import AdaptiveConfig, MoE, RoutingState, fold_statistics
from acmoe.ops import dispatch
from acmoe.routing.statistics import step


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    monkeypatch.setattr(dispatch, "_logged", set())
    caplog.set_level(logging.WARNING, logger="acmoe")
    return caplog


def test_evaluation_with_empty_statistics_says_so_once(logged: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleList([layer(0), layer(1)])
    for moe in model:
        moe(tokens(0), START)
    assert logged.messages == []
    model.eval()
    for moe in (*model, *model):
        moe(tokens(0), START)
    assert len(logged.messages) == 1
    assert "no batch has updated" in logged.messages[0]
    assert "acmoe.calibrate" in logged.messages[0]


def test_prefix_statistics_without_an_average_are_not_called_plain(
    logged: pytest.LogCaptureFixture,
) -> None:
    config = AdaptiveConfig(statistics="prefix")
    moe = MoE(dim=D, hidden=4, num_experts=C, top_k=1, router=config).eval()
    assignment = torch.arange(T)[:, None] % C
    moe(tokens(0), RoutingState.before(tokens(0), num_clusters=C)._replace(assignment=assignment))
    assert len(logged.messages) == 1
    assert "its scale is that of each sequence alone" in logged.messages[0]


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, True),  # running statistics are the default
        ({"eval_statistics": "batch"}, True),
        ({"statistics": "batch", "eval_statistics": "running"}, False),
        ({"mix": 2}, False),  # the shares of the clusters have a gradient
        ({"detach": True}, False),
    ],
)
def test_a_scale_without_gradient_warns_where_one_is_wanted(
    options: dict[str, Any], warns: bool, logged: pytest.LogCaptureFixture
) -> None:
    config = AdaptiveConfig(**{"detach": False, **options})
    moe = MoE(dim=D, hidden=4, num_experts=C, top_k=1, router=config)
    assert [line.partition(" in ")[0] for line in logged.messages] == (
        ["detach=False changes nothing"] if warns else []
    )
    _, state = moe(tokens(0).requires_grad_())
    of_batch = config.modes.train == "batch" and not config.detach
    assert state.scale.requires_grad == of_batch


def test_evaluation_of_a_trained_layer_says_nothing(logged: pytest.LogCaptureFixture) -> None:
    moe = layer()
    train(moe, torch.optim.SGD(moe.parameters(), lr=0.1), 0)
    moe.eval()(tokens(0), START)
    assert logged.messages == []


def test_a_training_loop_without_any_update_says_so_once(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "PATIENCE", 5)
    stepped, never = layer(0), layer(1)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.1)
    other = torch.optim.SGD(never.parameters(), lr=0.1)  # nobody calls its step
    for seed in range(8):
        train(stepped, optimizer, seed)
    assert logged.messages == []
    for seed in range(8):
        loss_of(never, tokens(seed))
    assert other.param_groups
    assert len(logged.messages) == 1
    assert "acmoe.fold_statistics(model)" in logged.messages[0]


def test_layers_that_an_idle_optimizer_holds_say_so(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "PATIENCE", 5)
    model = Adapted()
    idle = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model.moe.requires_grad_(True), idle, *range(4))
    other = torch.optim.SGD(model.adapter.parameters(), lr=0.1)
    for seed in range(4):
        model.moe(tokens(seed), START)
        other.step()
    assert logged.messages == []
    model.moe(tokens(4), START)
    assert len(logged.messages) == 1
    assert idle.param_groups


def test_a_repetition_of_a_checkpoint_is_no_forward_without_an_update(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "PATIENCE", 5)
    moe = layer()
    for seed in range(4):
        checkpoint(partial(loss_of, moe), tokens(seed), use_reentrant=False).backward()
    assert logged.messages == []


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
def test_compiled_training_without_any_update_says_so_in_eval(
    logged: pytest.LogCaptureFixture,
) -> None:
    moe = layer()
    torch._dynamo.reset()
    torch.compile(moe, backend="eager")(tokens(0), START)
    moe.train()
    assert logged.messages == []
    moe.eval()
    assert len(logged.messages) == 1
    assert "acmoe.fold_statistics(model)" in logged.messages[0]
    dispatch._logged.clear()
    fold_statistics(moe.train())
    moe.eval()
    assert len(logged.messages) == 1


def test_a_first_layer_without_clusters_has_nothing_to_say(
    logged: pytest.LogCaptureFixture,
) -> None:
    model = nn.ModuleList(layer(seed, statistics="prefix") for seed in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def outputs(x: Tensor) -> Tensor:
        y, state = model[0](x)
        z, _ = model[1](x + y, state)
        return cast(Tensor, z)

    outputs(tokens(0)).square().mean().backward()
    optimizer.step()
    model.eval()
    outputs(tokens(0))
    assert logged.messages == []


def test_a_copy_of_data_parallel_says_that_its_tokens_are_not_counted(
    logged: pytest.LogCaptureFixture,
) -> None:
    statistics = statistics_of(layer())
    x_BLD, cluster_BL = tokens(0)[None], torch.arange(T)[None] % C
    statistics.cluster_scale(x_BLD, cluster_BL)
    assert logged.messages == []
    replica = statistics._replicate_for_data_parallel()  # as nn.DataParallel makes one
    for _ in range(2):
        replica.cluster_scale(x_BLD, cluster_BL)
    assert len(logged.messages) == 1
    assert "use DistributedDataParallel (torchrun)" in logged.messages[0]
