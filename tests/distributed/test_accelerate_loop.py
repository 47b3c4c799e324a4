"""A loop of HuggingFace Accelerate on two gloo processes: nothing is said about statistics."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import launch, ports
from loops import buffers_of, same_on_all_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"

pytest.importorskip("accelerate", reason="needs accelerate: pip install 'acmoe[examples]'")
# Two processes that import accelerate. Pooling under DDP has its fast test in
# test_statistics_group.py.
pytestmark = pytest.mark.slow


def on_rank(rank: int, port: int) -> dict[str, Any]:
    """Run examples/accelerate_loop.py as `accelerate launch` would."""
    import os

    import torch.distributed as dist

    os.environ.update(MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
    sys.path.insert(0, str(EXAMPLES))
    import accelerate_loop

    from acmoe.routing.statistics import ClusterStatistics

    model, losses = accelerate_loop.main(epochs=1)
    found = [one for one in model.modules() if isinstance(one, ClusterStatistics)]
    result = {
        "backend": dist.get_backend(),
        "losses": losses,
        "equal": same_on_all_ranks(model),
        "buffers": buffers_of(model),
        "tokens": [float(one.weight.sum()) for one in found],
        "momentum": found[0].config.momentum,
    }
    dist.destroy_process_group()
    return result


def test_a_loop_of_accelerate_pools_the_running_statistics(tmp_path: Path) -> None:
    first, second = launch(2, on_rank, *ports(1), folder=tmp_path)
    assert first["backend"] == "gloo"
    assert len(first["losses"]) == 6  # 96 windows, 8 a step, on two processes
    assert first["losses"] != second["losses"]  # each has windows of its own
    assert first["equal"] and second["equal"]
    for one, other in zip(first["buffers"], second["buffers"], strict=True):
        assert torch.equal(one, other)
    # T tokens a step have the discounted count T + m T + ...; T is 2 processes x 8 x 64.
    expected = 2 * 8 * 64 * sum(first["momentum"] ** age for age in range(6))
    assert first["tokens"] == pytest.approx([expected] * len(first["tokens"]), rel=1e-5)
