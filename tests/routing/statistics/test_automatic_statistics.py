"""Running statistics move at every optimizer step, by all of its micro-batches, each counted once.

T tokens, D features, C clusters.
"""

import copy
import gc
import logging
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from router_loops import dispersion, rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from acmoe import (
    AdaptiveConfig,
    MetricConfig,
    MoE,
    RoutingState,
    SMoEConfig,
    build_router,
    fold_statistics,
)
from acmoe.ops import dispatch
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.running import update_average
from acmoe.routing.state import Routing
from acmoe.routing.statistics import ClusterStatistics, step

T, D, C = 12, 4, 3
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


def flat(moe: MoE, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    """Run the layer on plain tensors, the only arguments that a reentrant checkpoint can handle."""
    y, after = moe(x, RoutingState(*state))
    return (y, *after)


@pytest.mark.parametrize("way", ["plain", "not-reentrant", "reentrant"])
def test_three_steps_of_four_micro_batches_are_three_updates_of_four_batches(way: str) -> None:
    moe = layer()
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.5)
    average = [[0.0] * D for _ in range(C)]
    weight = [0.0] * C
    for number in range(3):
        merged = [[0.0] * D for _ in range(C)]
        seen = [0] * C
        for part in range(4):
            x = tokens(10 * number + part).requires_grad_()
            first = moe.router(x, START).affinity.argmax(-1)
            if way == "plain":
                y, *state = flat(moe, x, *START)
            else:
                again = way == "reentrant"
                y, *state = checkpoint(partial(flat, moe), x, *START, use_reentrant=again)
            (y.square().mean() + state[3]).backward()
            spreads = dispersion(rows(x.detach().double()), first.tolist(), C)
            for c in range(C):
                if spreads[c] is None:
                    continue
                count = (first == c).sum().item()
                seen[c] += count
                for d in range(D):
                    merged[c][d] += count * spreads[c][d].item()
        optimizer.step()
        optimizer.zero_grad()
        for c in range(C):
            old, weight[c] = MOMENTUM * weight[c], MOMENTUM * weight[c] + seen[c]
            for d in range(D):
                average[c][d] = (old * average[c][d] + merged[c][d]) / weight[c]
    found = statistics_of(moe)
    torch.testing.assert_close(found.weight.double(), torch.tensor(weight).double())
    torch.testing.assert_close(found.dispersion.double(), torch.tensor(average).double())


def test_the_loop_of_the_readme_moves_every_layer() -> None:
    page = (Path(__file__).parents[3] / "README.md").read_text()
    code = next(part for part in page.split("```python\n")[1:] if "loss.backward()" in part)
    names: dict[str, Any] = {}
    exec(code.split("```")[0], names)
    layers = nn.ModuleList([names["first"], names["second"]])
    moved = averages(layers)
    assert len(moved) == 2 * len(layers)  # dispersion and weight of each
    assert all(value.any() for value in moved.values())  # they begin at 0


def test_one_micro_batch_is_bitwise_its_dispersion() -> None:
    moe = layer()
    wanted = [torch.zeros(C, D), torch.zeros(C)]
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.5)
    for seed in range(4):
        first = moe.router(tokens(seed), START).affinity.argmax(-1)
        update_average(*wanted, *dispersion_and_count(tokens(seed), first, C), MOMENTUM)
        train(moe, optimizer, seed)
    assert torch.equal(statistics_of(moe).dispersion, wanted[0])
    assert torch.equal(statistics_of(moe).weight, wanted[1])


def test_a_call_by_hand_after_the_step_changes_nothing() -> None:
    moe = layer()
    train(moe, torch.optim.AdamW(moe.parameters(), fused=True), 0, 1)
    before = averages(moe)
    fold_statistics(moe)
    assert_same(averages(moe), before)
    assert moved(moe) > 0


def test_a_micro_batch_of_nan_leaves_the_others_as_they_are() -> None:
    found, wanted = layer(), layer()
    for moe, seeds in ((found, (0, None, 1)), (wanted, (0, 1))):
        for seed in seeds:
            x = torch.full((T, D), torch.nan) if seed is None else tokens(seed)
            with torch.no_grad():
                moe(x, START)
        torch.optim.SGD(moe.parameters(), lr=0.1).step()
    assert_same(averages(found), averages(wanted))
    assert statistics_of(found).dispersion.isfinite().all()


def test_a_single_token_of_a_micro_batch_has_no_dispersion_to_add() -> None:
    statistics = ClusterStatistics(AdaptiveConfig(), num_clusters=1, dim=1)
    for values in ([0.0, 2.0], [7.0]):  # the mean absolute deviation of 0 and 2 is 1
        x = torch.tensor(values)[None, :, None]
        statistics.cluster_scale(x, torch.zeros(1, len(values), dtype=torch.int64), None, None)
    fold_statistics(statistics)
    assert statistics.dispersion.tolist() == [[1.0]]
    assert statistics.weight.tolist() == [2.0]


def test_evaluation_counts_nothing_and_training_without_gradients_does() -> None:
    moe = layer()
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    moe.eval()
    with torch.no_grad():
        moe(tokens(0), START)
        optimizer.step()
        assert moved(moe) == 0
        moe.train()
        moe(tokens(0), START)
        optimizer.step()
    assert moved(moe) == pytest.approx(T, abs=2)  # an expert with one token has no dispersion


# An optimizer moves the statistics of the layers it trains.


def test_each_optimizer_moves_its_own_model_from_the_first_step_on() -> None:
    generator, critic = layer(0), layer(1)
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    loss_of(generator, tokens(0)).backward()
    loss_of(critic, tokens(1)).backward()
    of_generator.step()
    assert moved(generator) > 0
    assert moved(critic) == 0
    after = averages(generator)
    of_critic.step()
    assert moved(critic) > 0
    assert_same(averages(generator), after)
    train(critic, of_critic, 2)
    assert_same(averages(generator), after)


def test_two_optimizers_of_one_model_update_it_once_a_step() -> None:
    one, two = layer(), layer()
    train(one, torch.optim.SGD(one.parameters(), lr=0.1), 0, 1)
    optimizers = [torch.optim.SGD(p.parameters(), lr=0.1) for p in (two.experts, two.router)]
    for seed in (0, 1):
        loss_of(two, tokens(seed)).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same(averages(two), averages(one))


class Adapted(nn.Module):
    """A frozen MoE layer with a trained projection behind it, as adapters have it."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = layer().requires_grad_(False)
        self.adapter = nn.Linear(D, D)


def frozen() -> tuple[nn.Module, list[Tensor]]:
    model = Adapted()
    return model, list(model.adapter.parameters())


def master_weights() -> tuple[nn.Module, list[Tensor]]:
    """The optimizer has copies of the parameters, as DeepSpeed's and FSDP1's have."""
    moe = layer()
    return moe, [nn.Parameter(p.detach().clone()) for p in moe.parameters()]


@pytest.mark.parametrize("build", [frozen, master_weights])
def test_a_layer_that_no_optimizer_holds_is_moved_by_any(
    build: Callable[[], tuple[nn.Module, list[Tensor]]],
) -> None:
    model, held = build()
    moe = next(one for one in model.modules() if isinstance(one, MoE))
    optimizer = torch.optim.SGD(held, lr=0.1)
    for seed in range(2):
        before = moved(moe)
        moe(tokens(seed), START)
        optimizer.step()
        assert moved(moe) > before


def test_a_frozen_layer_whose_optimizer_is_gone_is_moved_by_any() -> None:
    """Train all, then an adapter alone: the second optimizer steps before the first is gone."""
    model = Adapted()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.SGD(model.adapter.parameters(), lr=0.1)
    train(model.moe.requires_grad_(True), first, 0)
    model.moe.requires_grad_(False)
    second.step()
    before = moved(model.moe)
    del first
    gc.collect()
    for seed in range(2):
        model.moe(tokens(seed), START)
        second.step()
        assert moved(model.moe) > before
        before = moved(model.moe)


def test_a_parameter_group_added_later_takes_its_layer_along() -> None:
    one, two = layer(0), layer(1)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    other = torch.optim.SGD(two.parameters(), lr=0.1)
    for moe in (one, two):
        loss_of(moe, tokens(0)).backward()
    optimizer.step()
    assert moved(two) == 0
    optimizer.add_param_group({"params": list(two.parameters())})
    optimizer.step()
    assert moved(two) > 0
    assert other.param_groups


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda moe: pickle.loads(pickle.dumps(moe))])
def test_a_copy_moves_with_its_own_optimizer(copied: Callable[[MoE], MoE]) -> None:
    moe = layer()
    other = copied(moe)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), 0)
    assert moved(other) > 0
    assert moved(moe) == 0


def test_a_teacher_in_evaluation_keeps_the_statistics_it_was_copied_with() -> None:
    moe = layer()
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    train(moe, optimizer, 0)
    loss_of(moe, tokens(1)).backward()  # the copy has a batch that waits for a step
    teacher = copy.deepcopy(moe).eval()
    before = averages(teacher)
    optimizer.step()
    train(moe, optimizer, 2)
    assert_same(averages(teacher), before)
    assert moved(moe) > moved(teacher)


def test_a_model_that_cannot_change_does_not_stop_the_steps_of_another() -> None:
    with torch.inference_mode():
        fixed = layer(1)
        fixed(tokens(0), START)
    with torch.device("meta"):
        planned = layer(2)
    moe = layer()
    train(moe, torch.optim.SGD(moe.parameters(), lr=0.1), 0)
    assert moved(moe) > 0
    assert moved(fixed) == 0
    assert statistics_of(planned).weight.is_meta


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # y is a view of the experts' output
def test_sharded_parameters_are_those_of_their_layer() -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        plain, one, two = layer(0), layer(0), layer(1)
        for moe in (one, two):
            dist.fsdp.fully_shard(moe, mesh=mesh)
        optimizers = [torch.optim.SGD(moe.parameters(), lr=0.1) for moe in (plain, one, two)]
        for moe in (plain, one, two):
            loss_of(moe, tokens(0)).backward()
        for optimizer in optimizers[:2]:
            optimizer.step()
        assert_same(averages(one), averages(plain))
        assert moved(two) == 0
    finally:
        dist.destroy_process_group()


def test_a_router_alone_moves_too() -> None:
    config = AdaptiveConfig(statistics="batch", statistics_of="current")
    router = build_router(config, dim=D, num_experts=C, top_k=1)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    state = START._replace(assignment=torch.arange(T)[:, None] % C)
    routing: Routing = router(tokens(0), state)
    routing.gate.sum().backward()
    optimizer.step()
    assert router.statistics.weight.tolist() == [4.0, 4.0, 4.0]


# Unusual steps


def test_the_forwards_of_a_closure_count_once_each() -> None:
    moe = layer()
    calls = 0
    optimizer = torch.optim.LBFGS(moe.parameters(), max_iter=3, lr=0.01)

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(moe, tokens(0))
        loss.backward()
        return loss

    optimizer.step(closure)
    assert calls > 1
    alone = layer()
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.0), 0)
    assert moved(moe) == calls * moved(alone)


def test_the_batches_of_a_skipped_step_count_in_the_next() -> None:
    moe, alone = layer(), layer()
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for seed in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(moe, tokens(seed))).backward()
        if seed == 0:
            moe.experts.up.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert (moved(moe) > 0) == (seed == 1)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.0), 0, 1)
    assert_same(averages(moe), averages(alone))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's own, about the profiler
def test_a_compiled_optimizer_step_moves_them() -> None:
    moe, plain = layer(), layer()
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    compiled = torch.compile(optimizer.step, backend="eager")
    for seed in range(2):
        loss_of(moe, tokens(seed)).backward()
        compiled()
        optimizer.zero_grad()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(2):
        train(plain, other, seed)
    assert_same(averages(moe), averages(plain))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("again", [None, False, True])
def test_compiled_layers_count_every_micro_batch_once(again: bool | None) -> None:
    """In an eager checkpoint the compiled code runs again in the backward."""
    moe, plain = layer(), layer()
    torch._dynamo.reset()
    compiled = torch.compile(partial(flat, moe), backend="inductor", fullgraph=True)
    for model, call in ((plain, partial(flat, plain)), (moe, compiled)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(4):
            x = tokens(seed).requires_grad_()
            if again is None or model is plain:
                y, *state = call(x, *START)
            else:
                y, *state = checkpoint(call, x, *START, use_reentrant=again)
            (y.square().mean() + state[3]).backward()
            if seed % 2:
                optimizer.step()
                optimizer.zero_grad()
    found, wanted = averages(moe), averages(plain)
    for key, value in found.items():
        torch.testing.assert_close(value, wanted[key], msg=key)
    torch._dynamo.reset()


def test_loading_weights_drops_the_batches_that_waited() -> None:
    moe, other = layer(), layer()
    loss_of(moe, tokens(0)).backward()
    moe.load_state_dict(other.state_dict())
    torch.optim.SGD(moe.parameters(), lr=0.1).step()
    assert moved(moe) == 0


# Other statistics of a step


def test_the_balancing_bias_counts_all_micro_batches() -> None:
    router = build_router(SMoEConfig(bias_balancing=0.5), dim=D, num_experts=C, top_k=1)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.0)
    load = torch.zeros(C)
    for seed in range(3):
        routing = checkpoint(lambda x: router(x, START)[:3], tokens(seed), use_reentrant=False)
        load += torch.bincount(routing[0].flatten(), minlength=C)
        routing[2].sum().backward()
    optimizer.step()
    assert load.sum() == 3 * T
    assert router.selection.bias.tolist() == (0.5 * (load.mean() - load).sign()).tolist()


def test_the_metric_router_counts_all_micro_batches() -> None:
    router = build_router(MetricConfig(), dim=D, num_experts=C, top_k=1)
    weights = []
    for seed in range(3):
        routing = router(tokens(seed), START)
        weights.append(torch.bincount(routing.affinity.argmax(-1), minlength=C))
    torch.optim.SGD(router.parameters(), lr=0.0).step()
    total = torch.stack(weights).sum(0)
    assert router.statistics.weight.tolist() == torch.where(total >= 2, total, 0).tolist()


# Layers whose statistics nothing moves say so.


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
    assert "no batch has moved" in logged.messages[0]
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
    statistics.cluster_scale(x_BLD, cluster_BL, None, None)
    assert logged.messages == []
    replica = statistics._replicate_for_data_parallel()  # as nn.DataParallel makes one
    for _ in range(2):
        replica.cluster_scale(x_BLD, cluster_BL, None, None)
    assert len(logged.messages) == 1
    assert "use DistributedDataParallel (torchrun)" in logged.messages[0]
