"""Experts shared by the processes of a run: the same losses and gradients as one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import furthest
from launched import launch_often, new_start
from loops import DIM, EXPERTS, STEPS, Stack, buffers_of, data, same_on_all_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import acmoe
from acmoe.config.parallel import ParallelConfig
from acmoe.distributed import start
from acmoe.distributed.experts import distribute_experts
from acmoe.distributed.parallelize import averaging, parallelize
from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.distributed.whole import gathered

pytestmark = pytest.mark.slow
LENGTHS = (8, 1, 5, 0)  # real tokens of each sequence: rank 3 of four has none
BIASED = acmoe.AdaptiveConfig(base=acmoe.SMoEConfig(bias=True), statistics_group="global")
BATCH = acmoe.AdaptiveConfig(statistics="batch", statistics_group="global")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"router": BATCH},
    "masked": {"masked": True},
    "starved": {"starved": True},  # all tokens go to experts 0 and 1
    "micro-batches": {"parts": 2},
}


class Blocks(Stack):
    """A stack whose layers are called blocks, as those of the library's models are."""

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers


def loop(
    ranks: Ranks,
    config: ParallelConfig,
    *,
    router: Any = BIASED,
    masked: bool = False,
    starved: bool = False,
    parts: int = 1,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Train a stack; rank r of n takes sequences r, r + n, ... of every batch."""
    rank, world = ranks.rank, ranks.size
    torch.manual_seed(0)
    balance = None if masked else acmoe.LossConfig(balance=0.1)  # a mean over unequal numbers
    model = Blocks(router, balance).to(dtype).train()
    if starved:
        for layer in model.layers:
            layer.router.base.bias.data.copy_(torch.tensor([50.0, 49.0, 0.0, 0.0]))
    wrapped = parallelize(model, ranks, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    trace, equal = [], True
    for step in range(STEPS):
        total, mask = torch.zeros((), dtype=dtype), None
        pieces = data(step, dtype)[rank::world].chunk(parts, dim=1)
        for part, x in enumerate(pieces):
            if masked:
                mask = torch.arange(8)[None] < torch.tensor(LENGTHS)[rank::world, None]
            with averaging(wrapped, part == parts - 1):
                loss = wrapped(x, mask) / parts
                loss.backward()
            total += loss.detach()
        gradients = whole_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        equal = equal and (world == 1 or same_on_all_ranks(model))
        trace.append(float(ranks.sum(total)) / world)
    return {"losses": trace, "equal": equal, "gradients": gradients, "buffers": buffers_of(model)}


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: gathered(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
    }


def loops(rank: int, config: ParallelConfig) -> dict[str, Any]:
    """Run all cases in one start of the processes."""
    start.TIMEOUT = 60.0
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        new_start()
        with start.joined(config, "cpu") as (ranks, _):
            found[name] = loop(ranks, config, **case)
    return found


LAYOUTS = {
    "2 ddp": ParallelConfig(data=2, expert=2),
    "4 ddp": ParallelConfig(data=4, expert=4),
    "2 x 2 ddp": ParallelConfig(data=4, expert=2),
    "4 fsdp": ParallelConfig(data=4, expert=4, shard="fsdp"),
    "2 x 2 fsdp": ParallelConfig(data=4, expert=2, shard="fsdp"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_gradients_and_statistics_are_those_of_one_process(
    tmp_path: Path, layout: str
) -> None:
    config = LAYOUTS[layout]
    found = launch_often(config.data, loops, config, folder=tmp_path)
    for name, case in CASES.items():
        one = loop(ALONE, ParallelConfig(), **case)
        assert furthest(found[0][name]["losses"], one["losses"]) < 1e-12, name
        assert all(result[name]["equal"] for result in found), name
        for parameter, gradient in one["gradients"].items():
            torch.testing.assert_close(
                found[0][name]["gradients"][parameter], gradient, rtol=1e-10, atol=1e-12
            )
        for theirs, own in zip(found[0][name]["buffers"], one["buffers"], strict=True):
            torch.testing.assert_close(theirs, own, rtol=1e-6, atol=1e-7)  # float32 averages


class Exchanges(TorchDispatchMode):
    """Counts the all-to-alls that are carried out."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops._c10d_functional.all_to_all_single.default
        return func(*args, **(kwargs or {}))


def recomputed(rank: int) -> list[tuple[int, float]]:
    """Count the all-to-alls of three layers, and add up a gradient, without and with recompute."""
    found = []
    config = ParallelConfig(data=2, expert=2)
    for checkpoint in (False, True):
        torch.manual_seed(0)
        sizes = {"dim": DIM, "hidden": 8, "num_experts": EXPERTS, "top_k": 2}
        blocks = [acmoe.MoEFFN(**sizes, router="smoe") for _ in range(3)]
        stack = acmoe.MoEStack(blocks, checkpoint=checkpoint).train()
        new_start()
        with start.joined(config, "cpu") as (ranks, _):
            assert ranks.mesh is not None
            distribute_experts(stack, ranks.mesh["expert"])
            with Exchanges() as exchanges:
                y, _ = stack(data(0, torch.float32)[rank::2].requires_grad_())
                y.square().mean().backward()
            total = sum(float(each.abs().sum()) for each in whole_gradients(stack).values())
        found.append((exchanges.number, total))
    return found


def test_a_recompute_exchanges_nothing(tmp_path: Path) -> None:
    """A layer and step take five all-to-alls: numbers of rows, rows and outputs there and back."""
    (plain, total), (checkpointed, again) = launch_often(2, recomputed, folder=tmp_path)[0]
    assert (plain, checkpointed) == (15, 15)
    assert again == total


def by_kernels(rank: int, config: ParallelConfig) -> dict[str, Any]:
    with start.joined(config, "cpu") as (ranks, _):
        return loop(ranks, config, dtype=torch.float32)


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_triton_kernels_serve_distributed_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str
) -> None:
    one = loop(ALONE, ParallelConfig(), dtype=torch.float32)
    config = ParallelConfig(data=2, expert=2, shard=shard)  # type: ignore[arg-type]
    monkeypatch.setenv("ACMOE_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = launch_often(2, by_kernels, config, folder=tmp_path, afresh=True)
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=1e-6)
