"""Loops of users on two processes: what one does alone must not stop or mislead the other."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import buffers_of, build, data, same_on_all_ranks
from ranks import in_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import acmoe
from acmoe.distributed.experts import distribute_experts
from acmoe.errors import UserError
from acmoe.routing.losses import stable_balance_loss
from acmoe.routing.statistics.group import group_of

BALANCE = acmoe.LossConfig(balance=0.1)
FLOAT = torch.float32


def many(rank: int) -> dict[str, Any]:
    # A process that waits for nobody fails here, and not after half an hour.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=30), dist.group.WORLD)
    return {
        "evaluated": evaluated(rank),
        "averaged": averaged(rank),
        "whole": updated(rank, torch.optim.SGD),
        "shared": updated(rank, in_shares),
        "empty": empty(rank),
        "meshes": meshes(rank),
        "stable": stable(rank),
        "joined": joined(rank),
        "joined later": joined(rank, before=1),
        "joined in a given group": joined(rank, given=True),
        "in place": in_place(rank),
    }


def step(rank: int, number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(data(number, FLOAT)[rank::2]).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluated(rank: int) -> tuple[bool, float]:
    """Let rank 0 evaluate between two steps; return how far a copy's loss is, too."""
    model = build("adaptive", FLOAT, BALANCE)
    acmoe.set_statistics_group(model, dist.group.WORLD)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step(rank, 0, wrapped, optimizer)
    loss = 0.0
    if rank == 0:
        model.eval()
        alone = build("adaptive", FLOAT, BALANCE).eval()
        alone.load_state_dict(model.state_dict())
        with torch.no_grad():
            loss = float(model(data(1, FLOAT)) - alone(data(1, FLOAT)))
        model.train()
    step(rank, 2, wrapped, optimizer)
    return same_on_all_ranks(model), loss


def averaged(rank: int) -> bool:
    """Average the weights on rank 0 alone; the copy is in training mode and no optimizer's."""
    model = build("adaptive", FLOAT)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step(rank, 0, wrapped, optimizer)
    average = AveragedModel(model) if rank == 0 else None
    for number in (1, 2):
        step(rank, number, wrapped, optimizer)
        if average is not None:
            average.update_parameters(model)
    return same_on_all_ranks(model)


def updated(rank: int, make: Callable[..., torch.optim.Optimizer]) -> list[Tensor]:
    """Train one matrix of each layer, of equal sizes: each process has one in its share."""
    model = build("adaptive", FLOAT)
    optimizer = make([layer.experts.down for layer in model.layers], lr=0.01)
    wrapped = DistributedDataParallel(model)
    for number in range(2):
        step(rank, number, wrapped, optimizer)
    return buffers_of(model)


def in_shares(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of torch.jit

    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=lr)


def meshes(rank: int) -> list[str]:
    """Return whom statistics are pooled with where experts lie on a mesh of one process each."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "expert"))
    found = []
    for wrapped in (False, True):
        model = build("adaptive", FLOAT)
        distribute_experts(model, mesh["expert"])
        statistics = model.layers[0].next_state.statistics
        if not wrapped:
            with pytest.raises(UserError) as stop:
                group_of(statistics)
            found.append(str(stop.value))
            continue
        experts = [name for name, _ in model.named_parameters() if ".experts." in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
        replica = DistributedDataParallel(model)
        found.append(group_of(statistics))
        assert replica.module is model
    return [*found, dist.group.WORLD.group_name]


def empty(rank: int) -> list[Tensor]:
    """Take a step whose tokens are all on rank 0; the mean over no token is NaN, and counts 0."""
    model = build("adaptive", FLOAT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    x = data(0, FLOAT)
    wrapped(x if rank == 0 else x[:0]).nan_to_num().backward()
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return buffers_of(model)


SCORE = torch.tensor([0.3, -1.0, 2.0, 0.5, 0.1, -0.4, 1.5], dtype=torch.float64)
EXPERT = torch.tensor([0, 0, 1, 2, 0, 1, 0])
MASK = torch.tensor([True, True, True, False, True, True, True])


def stable(rank: int) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of StableMoE's balance; rank 0 has five of seven tokens."""
    own = slice(0, 5) if rank == 0 else slice(5, 7)
    score = SCORE[own].clone().requires_grad_()
    name = dist.group.WORLD.group_name
    loss = stable_balance_loss(score, EXPERT[own], 3, MASK[own], group=name)
    loss.backward()
    assert score.grad is not None
    return loss.detach(), score.grad


def joined(rank: int, *, before: int = 0, given: bool = False) -> str:
    """Return the error of a loop in which rank 1 has one batch more.

    before: steps that both take before they join. given: the user names the group.
    """
    model = build("adaptive", FLOAT)
    if given:
        acmoe.set_statistics_group(model, dist.group.WORLD)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(before):
        step(rank, number, wrapped, optimizer)
    try:
        with wrapped.join():
            for number in range(1 + rank):
                step(rank, number, wrapped, optimizer)
    except UserError as error:
        return str(error)
    return "went on"


def in_place(rank: int) -> list[Tensor]:
    """Add the residual in place to the output of a sharded layer; return its gradients."""
    torch.manual_seed(0)
    layer = acmoe.MoE(dim=6, hidden=4, num_experts=4, top_k=2, router="adaptive")
    if dist.is_initialized():
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    x = torch.randn(2, 5, 6)  # the same on both processes: gradients are those of one
    with warnings.catch_warnings(action="error"):
        y, state = layer(x)
    y += x
    (y.square().sum() + state.aux_loss).backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(2, many, folder=tmp_path_factory.mktemp("ranks"))


def test_one_process_may_evaluate_while_the_others_wait(two: list[dict[str, Any]]) -> None:
    """Its balance loss is that of a model which is on no other process."""
    assert [result["evaluated"][0] for result in two] == [True, True]
    assert two[0]["evaluated"][1] == 0.0


def test_one_process_may_average_the_weights_alone(two: list[dict[str, Any]]) -> None:
    assert [result["averaged"] for result in two] == [True, True]


def test_shares_of_an_optimizer_update_the_statistics_together(two: list[dict[str, Any]]) -> None:
    for result in two:
        for whole, shared in zip(two[0]["whole"], result["shared"], strict=True):
            assert torch.equal(whole, shared)
    first, second = two[0]["whole"][0], two[0]["whole"][3]  # the dispersions of both layers
    assert not torch.allclose(first, second)


def test_the_mesh_of_experts_does_not_say_who_sees_other_tokens(two: list[dict[str, Any]]) -> None:
    refused, found, everyone = two[1]["meshes"]
    assert "lie on meshes (1,) of 2 processes; say which of them see tokens of their own" in refused
    assert found == everyone


def test_a_process_without_tokens_takes_part(two: list[dict[str, Any]]) -> None:
    alone = empty(0)
    for result in two:
        for found, expected in zip(result["empty"], alone, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_the_balance_loss_of_stable_moe_is_that_of_all_tokens(two: list[dict[str, Any]]) -> None:
    """Loads 4 and 2 of six tokens, of three experts: surplus (4/2 - 1, 2/2 - 1, 0/2 - 1)."""
    gate = SCORE.sigmoid()
    by_hand = (gate[0] + gate[1] + gate[4] + gate[6]) / 6
    slope = torch.where(MASK & (EXPERT == 0), gate * (1 - gate) / 6, 0.0)
    losses, gradients = zip(*(result["stable"] for result in two), strict=True)
    # Data parallel training takes the mean over two processes of losses and gradients.
    torch.testing.assert_close(sum(losses) / 2, by_hand, rtol=0, atol=1e-15)
    torch.testing.assert_close(torch.cat(gradients) / 2, slope, rtol=0, atol=1e-15)


def test_uneven_numbers_of_batches_are_refused(two: list[dict[str, Any]]) -> None:
    for result in two:
        for case in ("joined", "joined later", "joined in a given group"):
            assert "give all processes the same number of batches" in result[case], case


def test_a_residual_may_be_added_in_place_to_a_sharded_layer(two: list[dict[str, Any]]) -> None:
    for found in two:
        torch.testing.assert_close(found["in place"], in_place(0))
