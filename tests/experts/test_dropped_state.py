"""A model that drops the state between its layers is told so: it routes as the plain one."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acmoe import (
    AdaptiveConfig,
    MoE,
    MoEStack,
    RoutingState,
    SMoEConfig,
    SoftConfig,
    SoftMoE,
    build_router,
)
from acmoe.ops import dispatch
from acmoe.routing import counted_states

SIZES: dict[str, Any] = {"dim": 6, "num_experts": 4}
LAYERS = {
    "moe": partial(MoE, **SIZES, hidden=4, top_k=2),
    "soft": partial(SoftMoE, **SIZES, hidden=4),
    "alone": partial(build_router, **SIZES, top_k=2, standalone=True),
}


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(counted_states, "PATIENCE", 6)
    for name, value in (("without", 0), ("traced", 0), ("passed", False)):
        monkeypatch.setattr(counted_states.Calls, name, value)
    caplog.set_level(logging.WARNING, logger="acmoe")
    return caplog


def pair(kind: str) -> list[Any]:
    config = AdaptiveConfig(base=SoftConfig() if kind == "soft" else SMoEConfig())
    return [LAYERS[kind](router=config) for _ in range(2)]


def call(layer: Any, x: Tensor, state: RoutingState | None) -> tuple[Tensor, RoutingState]:
    if hasattr(layer, "experts"):
        y: tuple[Tensor, RoutingState] = layer(x, state)
        return y
    return x, layer.next_state(x, layer(x, state), state)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_never_get_a_state_say_so_once(kind: str, logged: Any) -> None:
    layers = pair(kind)
    x = torch.randn(2, 5, 6)
    for calls in range(1, 5):
        for layer in layers:
            call(layer, x, None)
        assert len(logged.messages) == (1 if 2 * calls >= 6 else 0)
    assert "y, state = moe(x, state)" in logged.messages[0]


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_get_their_states_say_nothing(kind: str, logged: Any) -> None:
    first, second = pair(kind)
    x = torch.randn(2, 5, 6)
    for _ in range(8):
        y, state = call(first, x, None)
        call(second, y, state)
    assert logged.messages == []


@pytest.mark.parametrize(("processes", "mentions"), [(1, False), (2, True)])
def test_one_layer_alone_is_told_and_may_be_the_first_stage_of_a_pipeline(
    processes: int, mentions: bool, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted_states, "world_size", lambda: processes)
    for _ in range(12):
        call(pair("moe")[0], torch.randn(2, 5, 6), None)
    (line,) = logged.messages
    assert "a single MoE layer has no layer before it" in line
    assert ("first stage of a pipeline" in line) == mentions


def test_an_export_is_no_call_and_steps_of_other_routers_count_for_nothing(logged: Any) -> None:
    x = torch.randn(5, 6)
    torch.export.export(pair("moe")[0].train(), (x,), strict=False)
    assert (counted_states.Calls.without, counted_states.Calls.traced) == (0, 0)
    counted_states.Calls.traced = 1
    metric = MoE(**SIZES, hidden=4, top_k=2, router="metric")
    optimizer = torch.optim.SGD(metric.parameters(), lr=0.1)
    for _ in range(8):
        metric(x)[0].sum().backward()
        optimizer.step()
    assert logged.messages == [] and counted_states.Calls.without == 0


def test_plain_layers_and_evaluations_say_nothing(logged: Any) -> None:
    plain, adaptive = MoE(**SIZES, hidden=4, top_k=2), pair("moe")[0].eval()
    for _ in range(8):
        plain(torch.randn(5, 6))
        call(adaptive, torch.randn(5, 6), None)
    assert not any("state of a layer before" in line for line in logged.messages)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
def test_a_state_that_compiled_layers_pass_is_seen(logged: Any) -> None:
    torch._dynamo.reset()
    first, second = pair("moe")
    stack = torch.compile(MoEStack(nn.Identity(), first, second), backend="eager", fullgraph=True)
    for _ in range(2):
        stack(torch.randn(5, 6))
    for _ in range(8):
        first(torch.randn(5, 6))
    assert logged.messages == []


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
def test_compiled_layers_that_never_get_a_state_say_so_after_some_steps(logged: Any) -> None:
    torch._dynamo.reset()
    layers = nn.ModuleList(pair("moe"))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    calls = [torch.compile(layer, backend="eager", fullgraph=True) for layer in layers]
    for step in range(1, 7):  # both layers share a graph: one trace, and one call a step
        for call in calls:
            call(torch.randn(5, 6))
        optimizer.step()
        assert len(logged.messages) == (1 if 1 + step >= 6 else 0)
