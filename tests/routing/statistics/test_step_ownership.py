"""Each optimizer step moves the statistics of the layers that it trains, and of no others.

T tokens, D features, C clusters.
"""

import copy
import gc
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from stepped_layers import (
    START,
    Adapted,
    C,
    D,
    T,
    assert_same,
    averages,
    layer,
    loss_of,
    moved,
    statistics_of,
    tokens,
    train,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from acmoe import AdaptiveConfig, MoE, build_router
from acmoe.routing.state import Routing
from acmoe.routing.statistics import registry, step_hook

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


def test_other_parameters_in_the_same_group_are_noticed() -> None:
    first, second = layer(0), layer(1)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    train(first, optimizer, 0)
    other = torch.optim.SGD(layer(2).parameters(), lr=0.1)
    other.step()
    optimizer.param_groups[0]["params"][:] = second.parameters()
    other.param_groups[0]["params"] = list(first.parameters())
    other.step()
    before = averages(first)
    loss_of(first, tokens(1)).backward()
    train(second, optimizer, 2)
    assert moved(second) > 0
    assert_same(averages(first), before)
    other.step()
    assert moved(first) > before["next_state.statistics.weight"].sum()


def test_a_step_on_fake_tensors_leaves_other_layers_alone() -> None:
    frozen = layer(0).requires_grad_(False)
    frozen(tokens(0), START)
    with FakeTensorMode():
        fake = layer(1)
        optimizer = torch.optim.SGD(fake.parameters(), lr=0.1)
        y, _ = fake(torch.randn(T, D))
        y.sum().backward()
        optimizer.step()
    assert moved(frozen) == 0
    train(trained := layer(2), torch.optim.SGD(trained.parameters(), lr=0.1), 0)
    assert moved(frozen) > 0


def test_the_collector_of_another_thread_does_not_wait_for_a_step() -> None:
    """A wrapper may be freed in any thread, also in one that holds a lock the step waits for."""
    before = registry.changes()
    thread = threading.Thread(target=registry.look_again, daemon=True)
    with registry.registry_lock:
        thread.start()
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert registry.changes() != before


def test_an_optimizer_is_found_behind_gc_freeze() -> None:
    """The collector sees no object that was there before; the critic's optimizer is one."""
    generator, critic = layer(0), layer(1)
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    gc.freeze()
    try:
        for model in (generator, critic):
            loss_of(model, tokens(0)).backward()
        of_generator.step()
        assert moved(generator) > 0
        assert moved(critic) == 0
        assert gc.get_freeze_count() > 0
        of_critic.step()
        assert moved(critic) > 0
    finally:
        gc.unfreeze()


def test_two_optimizers_of_one_model_update_it_once_a_step() -> None:
    one, two = layer(), layer()
    train(one, torch.optim.SGD(one.parameters(), lr=0.1), 0, 1)
    optimizers = [torch.optim.SGD(p.parameters(), lr=0.1) for p in (two.experts, two.router)]
    for seed in (0, 1):
        loss_of(two, tokens(seed)).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same(averages(two), averages(one))


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


def test_groups_that_take_turns_are_looked_up_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    # A step for each group is how some optimizers of many processes are called.
    one, two = layer(0), layer(1)
    optimizer = torch.optim.SGD([{"params": list(moe.parameters())} for moe in (one, two)], lr=0.1)
    groups = optimizer.param_groups
    found: list[int] = []
    find = step_hook._find
    monkeypatch.setattr(step_hook, "_find", lambda of: (found.append(1), find(of))[1])
    for step in range(6):
        for moe in (one, two):
            loss_of(moe, tokens(step)).backward()
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        if step == 1:
            found.clear()
    assert found == []
    assert moved(one) > 0 and moved(two) > 0


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
