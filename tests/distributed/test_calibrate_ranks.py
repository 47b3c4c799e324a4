"""`acmoe.calibrate` in several processes moves the averages by the tokens of all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import acmoe
from acmoe import AdaptiveConfig, UserError
from acmoe.routing.statistics import ClusterStatistics

pytest.importorskip("transformers", reason="needs transformers: pip install 'acmoe[hf]'")

CONFIG = AdaptiveConfig(momentum=0.5)


def attached() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    return acmoe.attach(MixtralForCausalLM(MixtralConfig(**sizes, **heads)), CONFIG)


def batch(seed: int) -> torch.Tensor:
    return torch.randint(50, (4, 24), generator=torch.Generator().manual_seed(seed))


def statistics(model: Any) -> ClusterStatistics:
    return next(one for one in model.modules() if isinstance(one, ClusterStatistics))


def averages(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return statistics(model).dispersion, statistics(model).weight


def test_a_process_that_measures_alone_needs_the_group_none() -> None:
    alone = averages(acmoe.calibrate(attached(), [batch(0), batch(1)]))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = attached()
        with pytest.raises(UserError, match=r"call acmoe\.set_statistics_group\(model, group\)"):
            acmoe.calibrate(model, [batch(2)])
        assert not statistics(model).own  # no batch waits for the next optimizer step
        acmoe.set_statistics_group(model, None)
        found = averages(acmoe.calibrate(model, [batch(0), batch(1)]))
        assert not statistics(model).own
    finally:
        dist.destroy_process_group()
    assert all(map(torch.equal, found, alone))


def on_rank(rank: int) -> dict[str, Any]:
    """Record a training batch, calibrate, and take the training step."""
    model = attached().train()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped(input_ids=batch(4 + rank), labels=batch(4 + rank)).loss.backward()
    acmoe.calibrate(wrapped, [batch(rank), batch(2 + rank)])
    calibrated = [one.clone() for one in averages(model)]
    optimizer.step()
    return {"calibrated": calibrated, "stepped": averages(model)}


def with_one_batch_more(rank: int) -> str:
    model = attached()
    acmoe.set_statistics_group(model, dist.group.WORLD)
    with pytest.raises(UserError) as error:
        acmoe.calibrate(model, [batch(seed) for seed in range(1 + rank)])
    assert not statistics(model).own
    return str(error.value)


@pytest.mark.slow
def test_unequal_numbers_of_batches_raise_on_every_process(tmp_path: Path) -> None:
    for says in in_ranks(2, with_one_batch_more, folder=tmp_path):
        assert says.startswith("batches: rank 0 has 1, and other processes have more")


def with_padding(rank: int) -> tuple[list[torch.Tensor], str]:
    """Calibrate by a batch that is padding on rank 1, then by one that is padding on both."""
    model = attached()
    acmoe.set_statistics_group(model, dist.group.WORLD)
    ones, zeros = torch.ones_like(batch(0)), torch.zeros_like(batch(0))
    acmoe.calibrate(model, [{"input_ids": batch(0), "attention_mask": zeros if rank else ones}])
    found = [one.clone() for one in averages(model)]
    with pytest.raises(UserError) as error:
        acmoe.calibrate(model, [{"input_ids": batch(0), "attention_mask": zeros}])
    return found, str(error.value)


@pytest.mark.slow
def test_a_batch_of_padding_raises_on_every_process_if_no_process_has_a_token(
    tmp_path: Path,
) -> None:
    alone = averages(acmoe.calibrate(attached(), [batch(0)]))
    for found, says in in_ranks(2, with_padding, folder=tmp_path):
        assert all(map(torch.equal, found, alone))
        assert says.startswith("batches: number 1 is padding alone")


@pytest.mark.slow
def test_every_process_has_the_averages_over_the_tokens_of_all(tmp_path: Path) -> None:
    first, second = in_ranks(2, on_rank, folder=tmp_path)
    for name in ("calibrated", "stepped"):
        assert all(map(torch.equal, first[name], second[name]))
    # One process whose gradient accumulation reads the batches of both.
    model = attached().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for name, seeds in (("calibrated", (0, 1)), ("calibrated", (2, 3)), ("stepped", (4, 5))):
        for seed in seeds:
            model(input_ids=batch(seed), labels=batch(seed)).loss.backward()
        optimizer.step()
        if seeds != (0, 1):
            torch.testing.assert_close(first[name], [*averages(model)], atol=1e-5, rtol=1e-5)
