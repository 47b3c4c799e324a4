"""Bytes that distributed experts and pipelines send, counted, beside the formulas of the page."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import launch_often, new_start
from loops import DIM, TOKENS, data
from test_expert_parallel import BIASED, Blocks

from acmoe.config.parallel import ParallelConfig
from acmoe.distributed import start
from acmoe.distributed.parallelize import parallelize
from acmoe.distributed.traffic import CountTraffic
from acmoe.lab.bench.scaling import boundary_bytes, expert_bytes, state_bytes
from acmoe.train.text import checked_corpus, text_trainer
from tiny_runs import byte_corpus, tiny_run

LAYERS, TOP_K, EXPERTS = 2, 2, 4


def experts(rank: int) -> dict[str, Any]:
    """Count the second step of a stack of two layers."""
    config = ParallelConfig(data=2, expert=2)
    new_start()
    with start.joined(config, "cpu") as (ranks, _):
        torch.manual_seed(0)
        model = Blocks(BIASED, None).train()
        wrapped = parallelize(model, ranks, config)
        for step in range(2):
            with CountTraffic() as traffic:
                wrapped(data(step, torch.float32)[rank::2].requires_grad_()).backward()
        return {"bytes": dict(traffic.bytes), "calls": dict(traffic.calls)}


@pytest.mark.slow
def test_distributed_experts_send_every_row_four_times(tmp_path: Path) -> None:
    """There and back, and the gradients there and back; and the number of rows of every expert."""
    found = launch_often(2, experts, folder=tmp_path)
    rows = LAYERS * expert_bytes(TOKENS, TOP_K, DIM, 4)
    assert rows == LAYERS * 4 * 32 * 2 * 6 * 4
    counts = LAYERS * 2 * EXPERTS * 8  # by both processes
    assert sum(one["bytes"]["all_to_all"] for one in found) == rows + counts
    assert [one["calls"]["all_to_all"] for one in found] == [LAYERS * 5] * 2


def pipeline(rank: int, folder: Path, *settings: str) -> int:
    """Count the bytes that this process sends in the third update of a pipeline."""
    config = tiny_run(folder / "corpus", "parallel.pipeline=2", *settings)
    new_start()
    with (
        start.joined(config.parallel, "cpu") as (ranks, device),
        closing(text_trainer(config, checked_corpus(config), device, ranks)) as trainer,
    ):
        for step in (1, 2, 3):
            with CountTraffic() as traffic:
                trainer.update(step, record=False)
        return traffic.bytes["send"]


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
def test_a_pipeline_sends_hidden_states_and_what_the_next_router_reads(
    tmp_path: Path, scaled: bool
) -> None:
    """Two micro-batches of 2 x 16 tokens, 16 features, 4 clusters, and () the auxiliary loss.

    A router with statistics of the tokens before each token computes its own scale.
    """
    byte_corpus(tmp_path)
    statistics = f"model.router.statistics={'running' if scaled else 'prefix'}"
    forward, backward = launch_often(2, pipeline, tmp_path, statistics, folder=tmp_path / "results")
    hidden = boundary_bytes(32, 16, 4) // 2  # one way
    assert hidden == 32 * 16 * 4
    state = state_bytes(32, 4, 16, with_scale=scaled)
    assert state == 32 * 4 + (4 * 16 * 4 if scaled else 0)
    assert forward == 2 * (hidden + 4 + state)
    assert backward == 2 * (hidden + 4)
