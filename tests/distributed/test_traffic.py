"""Bytes that a step gives to collectives, counted, beside the formulas of docs/scaling.md.

The group of several processes is torch's fake one: its collectives do nothing, and this process
plays rank 0. A slow test counts the same in processes of gloo.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from loops import DIM, EXPERTS, build, data
from ranks import in_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import acmoe
from acmoe.distributed.experts_ddp import REPLICA_OPTIONS
from acmoe.distributed.traffic import CountTraffic, wire_bytes
from acmoe.lab.bench.scaling import ddp_bytes, fsdp_bytes, global_bytes, pooled_bytes
from acmoe.routing.statistics import group, registry

LAYERS = 2
# Two layers with 4 clusters of 6 features: counts and sums are 4 x 7 numbers, deviations 4 x 6.
POOLED, GLOBAL = LAYERS * 28 * 4, LAYERS * (28 * 8 + 24 * 4)
BALANCE = LAYERS * 5 * 4  # the load of 4 experts and the number of tokens, in each forward


@pytest.fixture
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A model that a fixture of another file still holds would pool its statistics, too.
    for name in ("_statistics", "_layers"):
        monkeypatch.setattr(registry, name, WeakSet())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    group._agreed.clear()
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def count(rank: int, wrap: str, statistics_group: Any = "pooled", parts: int = 1) -> dict[str, Any]:
    """Count the third step: in the first ones the ranks meet, and DDP orders its buckets."""
    model = build(
        acmoe.AdaptiveConfig(statistics="running", statistics_group=statistics_group), torch.float32
    )
    sizes = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "buffers": sum(one.numel() * one.element_size() for one in model.buffers()),
    }
    wrapped: Any = model
    if wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    elif wrap == "replica":
        wrapped = DistributedDataParallel(model, **REPLICA_OPTIONS)
    elif wrap == "fsdp":
        for layer in model.layers:
            fully_shard(layer)
        wrapped = fully_shard(model)
    if wrap == "none" or statistics_group == "global":
        acmoe.set_statistics_group(model, dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        with CountTraffic() as traffic:
            for x in data(step, torch.float32)[:1].chunk(parts, dim=1):
                wrapped(x).backward()
            optimizer.step()
    return {"bytes": dict(traffic.bytes), "calls": dict(traffic.calls), **sizes}


def test_the_formulas_are_those_of_the_page() -> None:
    assert LAYERS * pooled_bytes(EXPERTS, DIM) == POOLED == 224
    assert LAYERS * global_bytes(EXPERTS, DIM) == GLOBAL == 640
    assert ddp_bytes(10) == 40
    assert fsdp_bytes(10, 3) == {"all_gather": 92, "reduce_scatter": 52}


@pytest.mark.parametrize("parts", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_pooled_statistics_are_reduced_once_a_step(fake_ranks: None, parts: int) -> None:
    found = count(0, "none", "pooled", parts)
    assert found["bytes"] == {"all_reduce": POOLED + parts * BALANCE}
    assert found["calls"] == {"all_reduce": 1 + parts * LAYERS}


@pytest.mark.parametrize("parts", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_global_statistics_are_reduced_twice_in_every_forward(fake_ranks: None, parts: int) -> None:
    found = count(0, "none", "global", parts)
    assert found["bytes"] == {"all_reduce": parts * (GLOBAL + BALANCE)}
    assert found["calls"] == {"all_reduce": parts * 3 * LAYERS}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fsdp_gathers_blocks_twice_and_scatters_gradients_once(fake_ranks: None) -> None:
    found = count(0, "fsdp")
    # Every parameter is in a block; 464 numbers a block divide evenly among four processes.
    expected = fsdp_bytes(found["parameters"], 0)
    assert found["bytes"] == {**expected, "all_reduce": POOLED}
    assert found["calls"] == {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 1}


def test_ddp_reduces_every_gradient_and_sends_the_buffers(one_rank: None) -> None:
    found = count(0, "ddp")
    assert found["parameters"] == 928
    assert found["bytes"] == {"all_reduce": ddp_bytes(928), "broadcast": found["buffers"]}
    # As `acmoe train` wraps its models.
    assert count(0, "replica")["bytes"] == {"all_reduce": ddp_bytes(928)}


@pytest.mark.slow
def test_two_processes_of_gloo_give_the_same_bytes(tmp_path: Path) -> None:
    for found in in_ranks(2, count, "ddp", folder=tmp_path):
        assert found["bytes"]["all_reduce"] == ddp_bytes(928) + POOLED
        assert found["bytes"]["broadcast"] == found["buffers"]
    for found in in_ranks(2, count, "fsdp", folder=tmp_path):
        assert found["bytes"] == {**fsdp_bytes(928, 0), "all_reduce": POOLED}


def test_a_ring_sends_each_byte_twice_but_for_what_is_at_home() -> None:
    assert wire_bytes({"all_reduce": 100}, 4) == 150
    assert wire_bytes({"all_gather": 100, "reduce_scatter": 100, "all_to_all": 100}, 4) == 225
    assert wire_bytes({"send": 7, "broadcast": 3}, 8) == 10


def test_every_collective_is_known_or_refused(one_rank: None) -> None:
    x, y = torch.zeros(3), torch.zeros(3)
    with CountTraffic() as traffic:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([y], x)
        dist.all_to_all_single(y, x)
        dist.barrier()
    assert traffic.bytes == {"all_reduce": 12, "broadcast": 12, "all_gather": 12, "all_to_all": 12}
    with pytest.raises(NotImplementedError, match="does not know the collective"), CountTraffic():
        dist.gather(x, [y])
