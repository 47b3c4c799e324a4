"""Four processes, two of which share the experts of each layer: the figures of one process.

test_expert_parallel.py has other layouts, masks, starved experts and whole runs (slow).
"""

from typing import Any

import pytest
import torch
from compared_runs import furthest
from launched import launch_often, new_start
from loops import data
from test_expert_parallel import BATCH, Blocks, loop
from torch import Tensor

from acmoe.config.parallel import ParallelConfig
from acmoe.distributed import start
from acmoe.distributed.parallelize import parallelize
from acmoe.distributed.ranks import ALONE, Ranks

FOUR = ParallelConfig(data=4, expert=2)


def trained(rank: int) -> dict[str, Any]:
    start.TIMEOUT = 60.0
    new_start()
    with start.joined(FOUR, "cpu") as (ranks, _):
        return {**loop(ranks, FOUR), "measured": measured(ranks, FOUR)}


def measured(ranks: Ranks, config: ParallelConfig) -> Tensor:
    """Return (C, D), in float64: the scale that a batch gives the second layer."""
    torch.manual_seed(0)
    model = Blocks(BATCH).double().train()
    scales: list[Tensor] = []
    model.layers[0].register_forward_hook(lambda module, given, out: scales.append(out[1].scale))
    parallelize(model, ranks, config)(data(0, torch.float64)[ranks.rank :: ranks.size])
    return scales[0].clone()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch_often(4, trained, folder=tmp_path_factory.mktemp("four"))


def test_losses_and_gradients_are_those_of_one_process(four: list[dict[str, Any]]) -> None:
    one = loop(ALONE, ParallelConfig())
    assert len(one["losses"]) == 6
    assert furthest(four[0]["losses"], one["losses"]) < 1e-12
    for name, gradient in one["gradients"].items():
        torch.testing.assert_close(four[0]["gradients"][name], gradient, rtol=1e-10, atol=1e-12)


def test_running_averages_are_bitwise_equal_on_all_processes(four: list[dict[str, Any]]) -> None:
    assert all(result["equal"] for result in four)
    assert any(buffer.abs().sum() > 0 for buffer in four[0]["buffers"])


def test_statistics_are_exact_where_experts_are_shared(four: list[dict[str, Any]]) -> None:
    """Every process, also that of the expert, has the dispersions of the tokens of all four."""
    one = measured(ALONE, ParallelConfig())
    assert one.dtype == torch.float64
    assert (one - 1).abs().max() > 0.1
    for result in four:
        torch.testing.assert_close(result["measured"], one, rtol=0, atol=1e-12)
