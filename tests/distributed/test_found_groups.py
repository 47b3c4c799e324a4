"""The group of processes that layers find by themselves: the present one, and on all of them."""

import copy
import gc
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import STEPS, build, data, train
from ranks import in_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import acmoe
from acmoe.errors import UserError
from acmoe.routing.statistics.group import group_of
from acmoe.routing.statistics.step import StepStatistics

FLOAT = torch.float32
TOKENS = (320, 960)  # of each process; a cluster of a single one would not count
OWN = acmoe.AdaptiveConfig()
GLOBAL = acmoe.AdaptiveConfig(statistics_group="global")
UNBALANCED = acmoe.LossConfig(balance=0.0)


def many(rank: int) -> dict[str, Any]:
    # A process that waits for nobody fails here, and not after half an hour.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=30), dist.group.WORLD)
    groups = [dist.new_group([0]), dist.new_group([1])]
    return {
        # before there are models of other cases
        "replicated, searches": [searches_of_replicated(rank, config) for config in (OWN, GLOBAL)],
        "sharded, searches": searches_of_sharded(rank),
        "copied": moved(rank, groups, copy.deepcopy),
        "pickled": moved(rank, groups, lambda model: pickle.loads(pickle.dumps(model))),
        "wrapped again": moved(rank, groups, lambda model: model),
        "copy alone": copy_alone(rank),
        "two groups": two_groups(rank, groups),
        "sharded": train(rank, "fsdp", GLOBAL, losses=UNBALANCED),
        "conditional": conditional(rank),
        "conditional, wrapped again": conditional_wrapped_again(rank),
        "averaged wrapper": averaged_wrapper(rank),
        "frozen objects": after_freeze(rank),  # last: it thaws the objects of imports
    }


def tokens_of(model: nn.Module) -> list[float]:
    """Return the number of tokens in the running averages of each layer."""
    kinds = [module for module in model.modules() if isinstance(module, StepStatistics)]
    return [float(one.weight.sum()) for one in kinds]


def step(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(rank)
    x = torch.randn(TOKENS[rank], 6)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


def after_freeze(rank: int) -> list[float]:
    """Take the first step after gc.freeze, which hides the wrapper from the collector."""
    model = build("adaptive", FLOAT)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gc.freeze()
    try:
        step(rank, wrapped, optimizer)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    return tokens_of(model)


def moved(rank: int, groups: Any, move: Callable[[nn.Module], nn.Module]) -> list[float]:
    """Train on both processes, then continue what `move` returns on a group of one."""
    model: nn.Module = build("adaptive", FLOAT)
    wrapped = DistributedDataParallel(model)
    step(rank, wrapped, torch.optim.SGD(model.parameters(), lr=0.01))
    del wrapped
    model = move(model)
    for module in model.modules():
        if isinstance(module, StepStatistics):
            module.reset_parameters()
    again = DistributedDataParallel(model, process_group=groups[rank])
    step(rank, again, torch.optim.SGD(model.parameters(), lr=0.01))
    return tokens_of(model)


def copy_alone(rank: int) -> str:
    """Return the error of a copy that nothing wraps."""
    model = build("adaptive", FLOAT)
    wrapped = DistributedDataParallel(model)
    step(rank, wrapped, torch.optim.SGD(model.parameters(), lr=0.01))
    alone = copy.deepcopy(model)
    try:
        step(rank, alone, torch.optim.SGD(alone.parameters(), lr=0.01))
    except UserError as error:
        return str(error)
    return "went on"


def two_groups(rank: int, groups: Any) -> str:
    """Return the error of a model in two wrappers of different groups."""
    model = build("adaptive", FLOAT)
    both = (
        DistributedDataParallel(model),
        DistributedDataParallel(model, process_group=groups[rank]),
    )
    statistics = next(one for one in model.modules() if isinstance(one, StepStatistics))
    try:
        group_of(statistics)
    except UserError as error:
        return str(error)
    return f"went on in {len(both)}"


class Tower(nn.Module):
    """A trained map, and frozen MoE layers that only some batches pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(6, 6)
        self.frozen = build("adaptive", FLOAT).requires_grad_(False)

    def forward(self, x: Tensor, tokens: Tensor | None) -> Tensor:
        loss: Tensor = self.trained(x).square().mean()
        return loss if tokens is None else loss + self.frozen(tokens)


def conditional(rank: int) -> list[float]:
    """Let rank 1 alone call the frozen layers in the first two steps, and rank 0 in the third."""
    wrapped = DistributedDataParallel(Tower())
    optimizer = torch.optim.SGD(wrapped.module.trained.parameters(), lr=0.01)
    for number in range(3):
        tokens = data(number, FLOAT) if (number < 2) == (rank == 1) else None
        wrapped(torch.ones(2, 6), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tokens_of(wrapped.module)


def conditional_wrapped_again(rank: int) -> list[float]:
    """Load and wrap a tower anew after each step; rank 1 alone calls its frozen layers.

    Loading drops what a process knows of the layers' batches, and the optimizer stays the same, so
    that its next step has no reason of its own to look for the group.
    """
    tower = Tower()
    optimizer = torch.optim.SGD(tower.trained.parameters(), lr=0.01)
    for number in range(3):
        wrapped = DistributedDataParallel(tower)
        tokens = data(number, FLOAT) if number > 0 and rank == 1 else None
        wrapped(torch.ones(2, 6), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        del wrapped
        gc.collect()
        tower.load_state_dict(tower.state_dict())
    return tokens_of(tower)


def averaged_wrapper(rank: int) -> list[float]:
    """Average the weights on rank 0 alone, in a copy of the wrapper itself."""
    wrapped = DistributedDataParallel(build("adaptive", FLOAT))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    average = AveragedModel(wrapped) if rank == 0 else None
    for _ in range(2):
        step(rank, wrapped, optimizer)
        if average is not None:
            average.update_parameters(wrapped)
    return tokens_of(wrapped)


def searches_of_sharded(rank: int) -> int:
    """Return how often a step of a sharded model searches all objects of the process."""
    gc.collect()
    model = build("adaptive", FLOAT)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mock.patch("gc.get_referrers", wraps=gc.get_referrers) as listed:
        step(rank, model, optimizer)
    return listed.call_count


def searches_of_replicated(rank: int, config: acmoe.AdaptiveConfig) -> int:
    """Return how often the first step of a replica of two layers searches all objects."""
    gc.collect()
    model = build(config, FLOAT)
    assert len(tokens_of(model)) == 2
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mock.patch("gc.get_referrers", wraps=gc.get_referrers) as listed:
        step(rank, wrapped, optimizer)
    assert tokens_of(model) == [sum(TOKENS)] * 2
    return listed.call_count


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(2, many, folder=tmp_path_factory.mktemp("ranks"))


def test_a_wrapper_is_found_behind_gc_freeze(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["frozen objects"] == [sum(TOKENS)] * 2


@pytest.mark.parametrize("way", ["copied", "pickled", "wrapped again"])
def test_a_model_takes_the_group_of_its_present_wrapper(
    two: list[dict[str, Any]], way: str
) -> None:
    """Each process trains its own copy, so its averages hold its own tokens only."""
    for tokens, result in zip(TOKENS, two, strict=True):
        assert result[way] == [tokens] * 2


def test_a_copy_that_nothing_wraps_does_not_pool_with_the_copies_of_others(
    two: list[dict[str, Any]],
) -> None:
    for result in two:
        assert "neither in a DistributedDataParallel nor sharded" in result["copy alone"]


def test_wrappers_of_different_groups_are_refused(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert "in 2 DistributedDataParallel of 2 different groups" in result["two groups"]


def test_global_statistics_find_the_mesh_while_parameters_are_whole(
    two: list[dict[str, Any]],
) -> None:
    """They are needed in the forward pass, for which FSDP2 has gathered the parameters."""
    alone = train(0, "none", GLOBAL, losses=UNBALANCED)
    assert len(alone["losses"]) == STEPS
    for result in two:
        torch.testing.assert_close(result["sharded"]["losses"], alone["losses"], rtol=0, atol=1e-12)


def test_sharded_parameters_name_their_group_without_a_search(two: list[dict[str, Any]]) -> None:
    """To search all objects takes about 0.1 s, for each layer."""
    assert [one["sharded, searches"] for one in two] == [0, 0]


def test_one_search_finds_the_replica_of_all_layers(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["replicated, searches"] == [1, 1]


def test_a_process_that_does_not_call_a_frozen_layer_takes_part(two: list[dict[str, Any]]) -> None:
    """Three batches of 32 tokens, in three steps of momentum 0.99, wherever each came from."""
    for result in two:
        assert result["conditional"] == pytest.approx([32 * (1 + 0.99 + 0.99**2)] * 2, rel=1e-6)


def test_a_process_that_has_not_called_a_frozen_layer_takes_part_in_its_next_wrapper(
    two: list[dict[str, Any]],
) -> None:
    for result in two:
        found = result["conditional, wrapped again"]
        assert found == pytest.approx([32 * (1 + 0.99)] * 2, rel=1e-6)


def test_one_process_may_average_the_wrapper_alone(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["averaged wrapper"] == pytest.approx([sum(TOKENS) * 1.99] * 2, rel=1e-6)
