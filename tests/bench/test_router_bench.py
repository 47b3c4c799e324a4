"""The router's benchmark, the list of what runs, and training steps, on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from acmoe.bench import router as router_bench
from acmoe.bench.layer import BOTH, FORWARD
from acmoe.bench.router import RouterBenchConfig, bench_router, check_mode, draw_trial
from acmoe.bench.shapes import SHAPES
from acmoe.bench.which import rivals, which
from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import UserError
from acmoe.ops.backend import use_backend
from acmoe.ops.grouped import grouped_linear
from acmoe.routing.statistics import ClusterStatistics

CPU = torch.device("cpu")


def test_every_mode_is_measured_and_compared_with_the_plain_layer() -> None:
    config = RouterBenchConfig(shapes=("tiny",), repeat=2, device="cpu")
    rows = {(row["mode"], row["part"]): row for row in bench_router(config).rows}
    assert set(rows) == {
        *((mode, BOTH) for mode in ("plain", "batch", "running", "current")),
        *((mode, FORWARD) for mode in ("plain", "running")),
        ("plain routing alone", BOTH),
    }
    plain = rows["plain", BOTH]
    assert plain["added_ms"] is None
    for mode in ("batch", "running", "current"):
        row = rows[mode, BOTH]
        assert row["added_ms"] == pytest.approx(row["ms"] - plain["ms"])
        assert row["added_percent"] == pytest.approx(100 * row["added_ms"] / plain["ms"])
        assert row["floor_ms"] > 0


def test_a_mode_that_routes_by_another_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The reference multiplies by 1/s; strength 1e9 is nearly the plain router.
    plain_like = AdaptiveConfig(statistics="batch", statistics_of="current", strength=1e9)
    monkeypatch.setitem(router_bench.MODES, "current", plain_like)
    config = RouterBenchConfig(shapes=("tiny",), repeat=2, device="cpu", dtype="fp32")
    rows = {row["mode"]: row for row in bench_router(config).rows if row["part"] == BOTH}
    assert "WrongResultError" in rows["current"]["refused"] and rows["current"]["ms"] is None
    assert rows["batch"]["refused"] is None


def test_the_plain_layer_fails_the_check_of_an_adaptive_one() -> None:
    config = RouterBenchConfig(dtype="fp32", device="cpu")
    trial = draw_trial(SHAPES["tiny"], config, CPU)
    moe = router_bench.build_moe(trial.shape, trial.weights)
    check_mode(moe, "plain", trial)
    with pytest.raises(Exception, match="relative error"):
        check_mode(moe, "batch", trial)


def test_graphs_and_compilation_are_refused_on_a_cpu() -> None:
    with pytest.raises(UserError, match="device=cpu"):
        bench_router(RouterBenchConfig(graph=True, device="cpu"))


def test_one_backend_of_each_op_runs_and_the_others_say_why_not() -> None:
    choices = which(CPU, torch.bfloat16)
    for op in ("experts", "statistics"):
        mine = {choice.backend: choice for choice in choices if choice.op == op}
        assert [name for name, choice in mine.items() if choice.runs] == ["torch"]
        assert "CUDA" in (mine["triton"].obstacle or "")


def test_a_request_that_cannot_be_met_still_names_what_runs() -> None:
    with use_backend("grouped_mm"):
        runs = [choice for choice in which(CPU, torch.float32) if choice.runs]
    assert {(choice.op, choice.backend) for choice in runs} == {
        ("experts", "torch"),
        ("statistics", "torch"),
    }


def test_statistics_by_an_op_of_our_own_are_told_from_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = ClusterStatistics.cluster_scale

    def by_own_op(self: ClusterStatistics, x: Tensor, *others: Any) -> Tensor:
        end = torch.tensor([x.shape[1]])
        grouped_linear(x[0], torch.ones(1, 1, x.shape[2], dtype=x.dtype), end)
        return plain(self, x, *others)

    monkeypatch.setattr(ClusterStatistics, "cluster_scale", by_own_op)
    runs = {choice.op: choice.backend for choice in which(CPU, torch.float32) if choice.runs}
    assert runs["statistics"] == "triton"


def test_rivals_that_can_take_part_have_no_obstacle() -> None:
    found = {choice.backend: choice for choice in rivals(CPU, torch.bfloat16)}
    assert found["acmoe"].runs and found["acmoe"].obstacle is None
    assert not found["sonicmoe"].runs and found["sonicmoe"].obstacle
