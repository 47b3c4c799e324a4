"""Statistics of data parallel training: pooled or global over all processes, never drifting."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compared_runs import furthest
from loops import DIM, EXPERTS, build, data, train
from ranks import in_ranks
from torch.nn.parallel import DistributedDataParallel

import acmoe
from acmoe.errors import UserError
from acmoe.ops.statistics.dispersion import dispersion
from acmoe.ops.statistics.over_ranks import dispersion_over_ranks

GLOBAL = acmoe.AdaptiveConfig(statistics_group="global")


def many(rank: int) -> dict[str, Any]:
    """All cases in one start of the processes, which costs more than the cases."""
    balance = acmoe.LossConfig(balance=0.1)
    lossfree = acmoe.AdaptiveConfig(
        base=acmoe.SMoEConfig(bias_balancing=0.01), statistics_group="global"
    )
    batch = acmoe.AdaptiveConfig(statistics="batch", statistics_group="global")
    found = {
        "global": train(rank, "ddp", GLOBAL, losses=balance, whole=True),
        "fsdp": train(rank, "fsdp", GLOBAL, losses=balance, whole=True),
        "batch": train(rank, "ddp", batch, losses=balance, whole=True),
        "lossfree": train(rank, "ddp", lossfree, whole=True),
        "pooled": train(rank, "ddp", "adaptive"),
        "pooled fsdp": train(rank, "fsdp", "adaptive"),
        "parts": train(rank, "ddp", "adaptive", parts=2),
        "metric": train(rank, "ddp", "metric"),
    }
    return found | {
        "once": once(rank),
        "error": lost(rank),
        "local": refused(rank),
        "exact": exact(rank),
        "recomputed": recomputed(rank),
    }


def once(rank: int) -> dict[str, Any]:
    """Take one step of two micro-batches; return what waited for it, and the averages after it."""
    model = build("adaptive", torch.float32)
    statistics = model.layers[0].next_state.statistics
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in data(0, torch.float32)[rank::2].chunk(2, dim=1):
        wrapped(x).backward()
    count, mean = statistics.own["last_count"].clone(), statistics.own["last_dispersion"].clone()
    optimizer.step()
    return {
        "count": count,
        "mean": mean,
        "weight": statistics.weight.clone(),
        "dispersion": statistics.dispersion.clone(),
        "waiting": statistics.own["last_count"].clone(),
    }


def recomputed(rank: int) -> list[int]:
    """Count the reductions of a step with batch statistics, without and with recomputation."""
    found = []
    for checkpoint in (False, True):
        config = acmoe.AdaptiveConfig(statistics="batch", statistics_group="global")
        sizes = {"dim": DIM, "hidden": 8, "num_experts": EXPERTS, "top_k": 2}
        blocks = [acmoe.MoEFFN(**sizes, router=config) for _ in range(3)]
        stack = acmoe.MoEStack(blocks, checkpoint=checkpoint).train()
        acmoe.set_statistics_group(stack, dist.group.WORLD)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reductions:
            y, state = stack(data(0, torch.float32)[rank::2].requires_grad_())
            (y.square().mean() + state.aux_loss).backward()
        found.append(reductions.call_count)
    return found


def lost(rank: int) -> str:
    """Return the error of a model that nothing averages."""
    model = build("adaptive", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(data(0, torch.float32)).backward()
    with pytest.raises(UserError) as stop:
        optimizer.step()
    acmoe.set_statistics_group(model, None)
    optimizer.step()  # each process trains a model of its own
    assert model.layers[0].next_state.statistics.weight.sum() > 0
    return str(stop.value)


def refused(rank: int) -> str:
    with pytest.raises(UserError) as stop:
        train(rank, "ddp", acmoe.AdaptiveConfig(statistics_group="local"))
    return str(stop.value)


def exact(rank: int) -> dict[str, Any]:
    """Measure clusters of which rank 1 has no token, and equal tokens far from zero."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(9, DIM, generator=generator)
    clusters = torch.tensor([0, 0, 1, 2, 2, 2, 1, 0, -1])
    if rank == 1:
        clusters = clusters.masked_fill(clusters == 2, 0)
    mask = torch.arange(9) != rank  # another token on each rank
    name = dist.group.WORLD.group_name
    measured = {
        measure: dispersion_over_ranks(x, clusters, EXPERTS, measure, mask, name)
        for measure in ("mad", "variance", "std")
    }
    same = dispersion_over_ranks(
        torch.full((5, DIM), 4097.3), torch.zeros(5, dtype=torch.int64), EXPERTS, "mad", None, name
    )
    return {"x": x, "clusters": clusters, "mask": mask, "measured": measured, "same": same[0]}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(2, many, folder=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ["global", "fsdp", "batch", "lossfree"])
def test_global_statistics_equal_one_process(two: list[dict[str, Any]], name: str) -> None:
    routers: dict[str, Any] = {
        "batch": acmoe.AdaptiveConfig(statistics="batch"),
        "lossfree": acmoe.AdaptiveConfig(base=acmoe.SMoEConfig(bias_balancing=0.01)),
    }
    losses = None if name == "lossfree" else acmoe.LossConfig(balance=0.1)
    alone = train(0, "none", routers.get(name, "adaptive"), losses=losses)
    assert furthest(two[0][name]["losses"], alone["losses"]) < 1e-12
    for found, expected in zip(two[0][name]["buffers"], alone["buffers"], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # float32 averages


@pytest.mark.parametrize(
    "name", ["global", "fsdp", "batch", "lossfree", "pooled", "pooled fsdp", "parts", "metric"]
)
def test_running_values_are_bitwise_equal_on_all_ranks(
    two: list[dict[str, Any]], name: str
) -> None:
    assert all(result[name]["equal"] for result in two)
    assert any(buffer.abs().sum() > 0 for buffer in two[0][name]["buffers"])


def test_an_update_is_the_mean_over_the_tokens_of_all_ranks(two: list[dict[str, Any]]) -> None:
    """Also with two micro-batches: DDP broadcasts buffers of rank 0 before every forward."""
    parts = [result["once"] for result in two]
    count = sum(part["count"] for part in parts)
    mean = (
        sum(part["count"][:, None] * part["mean"] for part in parts) / count.clamp(min=1)[:, None]
    )
    seen = count >= 2
    assert seen.any()
    assert not torch.equal(parts[0]["count"], parts[1]["count"])
    for part in parts:
        assert torch.equal(part["weight"], torch.where(seen, count, 0.0))
        torch.testing.assert_close(part["dispersion"][seen], mean[seen], rtol=1e-6, atol=1e-6)
        assert not part["waiting"].any()


def test_a_model_that_nothing_averages_raises_and_names_the_fix(two: list[dict[str, Any]]) -> None:
    assert "acmoe.set_statistics_group(model, group)" in two[1]["error"]
    assert "2 processes" in two[1]["error"]


def test_local_running_averages_are_refused(two: list[dict[str, Any]]) -> None:
    assert "drift apart; use 'pooled' or 'global'" in two[0]["local"]


def test_a_recompute_communicates_nothing(two: list[dict[str, Any]]) -> None:
    plain, checkpointed = two[0]["recomputed"]
    assert plain == checkpointed
    assert plain > 3


@pytest.mark.parametrize("measure", ["mad", "variance", "std"])
def test_dispersion_over_ranks_is_that_of_all_tokens(
    two: list[dict[str, Any]], measure: str
) -> None:
    parts = [result["exact"] for result in two]
    x, clusters, mask = (
        torch.cat([part[name] for part in parts]) for name in ("x", "clusters", "mask")
    )
    expected = dispersion(
        x.double(),
        clusters,
        EXPERTS,
        measure=measure,
        token_mask=mask,  # type: ignore[arg-type]
    )
    for part in parts:
        spread, count = part["measured"][measure]
        torch.testing.assert_close(spread.double(), expected.double(), rtol=1e-5, atol=1e-6)
        kept = clusters[mask]
        assert count.tolist() == [float((kept == c).sum()) for c in range(EXPERTS)]


def test_equal_tokens_on_all_ranks_have_no_dispersion(two: list[dict[str, Any]]) -> None:
    assert not two[0]["exact"]["same"].any()


def test_measures_that_need_sorted_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="sorted in one process"):
        acmoe.AdaptiveConfig(measure="gini", statistics_group="global")
    with pytest.raises(UserError, match="detach=False"):
        acmoe.AdaptiveConfig(detach=False, statistics_group="global")


def test_one_process_pools_with_nobody(tmp_path: Path) -> None:
    """Without torch.distributed the batches wait in the buffers themselves, as before."""
    model = build("adaptive", torch.float32)
    model(data(0, torch.float32)).backward()
    statistics = model.layers[0].next_state.statistics
    assert not statistics.own
    assert statistics.last_count.sum() > 0
