"""The router's benchmark on a CPU."""

import pytest
import torch

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import UserError
from acmoe.lab.bench.harness.options import BOTH, FORWARD
from acmoe.lab.bench.layers import router as router_bench
from acmoe.lab.bench.layers.router import RouterBenchConfig, bench_router
from acmoe.lab.bench.layers.router_trial import (
    PLAIN,
    Trial,
    as_timed,
    check_mode,
    draw_trial,
    with_equal_choices,
)
from acmoe.lab.bench.shapes import SHAPES
from acmoe.routing.state import RoutingState

CPU = torch.device("cpu")


def test_every_mode_is_measured_and_compared_with_the_plain_layer() -> None:
    config = RouterBenchConfig(shapes=("tiny",), repeat=2, device="cpu", dtype="fp32")
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


def test_forward_alone_measures_the_modes_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: calls.append("backward"))
    config = RouterBenchConfig(shapes=("tiny",), repeat=2, device="cpu", forward=True)
    report = bench_router(config)
    rows = {row["mode"]: row for row in report.rows}
    assert set(rows) == {"plain", "running", "plain routing alone"}
    assert report.kind == "router-forward" and not calls
    assert {row["part"] for row in report.rows} == {FORWARD}
    added = rows["running"]["ms"] - rows["plain"]["ms"]
    assert rows["running"]["added_ms"] == pytest.approx(added) and rows["running"]["ms"] > 0
    assert RouterBenchConfig(compile=True, forward=True, graph=True).kind == (
        "router-compile-forward-graph"
    )


def test_statistics_of_sequences_are_checked_and_measured() -> None:
    config = RouterBenchConfig(
        shapes=("tiny",), repeat=2, device="cpu", statistics=("prefix", "sequence"), length=64
    )
    rows = {(row["mode"], row["part"]): row for row in bench_router(config).rows}
    assert set(rows) == {
        *((mode, BOTH) for mode in ("plain", "prefix", "sequence", "plain routing alone")),
        *((mode, FORWARD) for mode in ("plain", "prefix")),  # only they decode
    }
    assert not [row["refused"] for row in rows.values() if row["refused"]]


@pytest.mark.parametrize("mode", ["prefix", "sequence"])
def test_statistics_of_other_sequences_are_refused(mode: str) -> None:
    drawn = draw_trial(SHAPES["tiny"], RouterBenchConfig(dtype="fp32", device="cpu"), CPU)
    right, wrong = drawn.in_sequences(64), drawn.in_sequences(128)
    moe = router_bench.build_moe(drawn.shape, drawn.weights, router_bench.MODES[mode])
    check_mode(moe, mode, right)

    def other_sequences(x: torch.Tensor, state: RoutingState) -> tuple[torch.Tensor, RoutingState]:
        y, state = moe(x.view(wrong.x.shape), state)
        return y.view(x.shape), state

    with pytest.raises(Exception, match="relative error"):
        check_mode(other_sequences, mode, right)


def test_options_that_measure_nothing_are_refused() -> None:
    for options, message in [
        ({"statistics": ("prefx",)}, "statistics='prefx' is unknown; choose one of batch"),
        ({"length": 0}, "length=0; give a positive"),
        ({"length": 64}, "length=64 is read for prefix and sequence alone"),
        ({"statistics": ("batch", "batch")}, "statistics holds 'batch' twice"),
        ({"statistics": ("batch",), "forward": True}, "not statistics=batch"),
    ]:
        with pytest.raises(UserError, match=message):
            RouterBenchConfig(**options)
    config = RouterBenchConfig(shapes=("tiny",), repeat=2, statistics=("prefix",), length=60)
    refused = next(row for row in bench_router(config).rows if row["mode"] == "prefix")["refused"]
    assert "256 tokens are no sequences of length=60; give a divisor of 256" in refused


def test_statistics_that_cannot_decode_are_named_where_they_are_left_out() -> None:
    told: list[str] = []
    config = RouterBenchConfig(
        shapes=("tiny",), repeat=2, forward=True, statistics=("batch", "running", "sequence")
    )
    bench_router(config, say=told.append)
    assert told[0] == (
        "not measured: batch, sequence; they depend on later tokens, and cannot decode"
    )


def test_a_mode_that_is_wrong_in_evaluation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = router_bench.build_moe

    def wrong(*arguments: object) -> torch.nn.Module:
        moe = right(*arguments)
        moe.register_forward_hook(
            lambda moe, _, found: found if moe.training else (1.1 * found[0], found[1])
        )
        return moe

    monkeypatch.setattr(router_bench, "build_moe", wrong)
    config = RouterBenchConfig(shapes=("tiny",), repeat=2, device="cpu")
    rows = {row["mode"]: row for row in bench_router(config).rows}
    assert "relative error 1.0e-01 forward; " in rows["running"]["refused"]
    assert rows["batch"]["refused"] is None  # it is trained only


@pytest.mark.parametrize("mode", router_bench.MODES)
def test_a_layer_is_timed_with_the_state_of_one_like_it(mode: str) -> None:
    trial = draw_trial(SHAPES["tiny"], RouterBenchConfig(dtype="fp32", device="cpu"), CPU)
    moe = router_bench.build_moe(trial.shape, trial.weights, router_bench.MODES[mode])
    timed, passed_on = as_timed(mode, trial).state, moe(trial.x)[1]
    assert timed.origin.shape == passed_on.origin.shape
    assert [one.shape for one in timed] == [one.shape for one in passed_on]
    if mode == PLAIN:  # nothing is made anew between plain layers
        assert moe(trial.x, timed)[1].scale is timed.scale


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


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_timed_layers_have_the_experts_of_the_plain_one(mode: str) -> None:
    drawn = draw_trial(SHAPES["tiny"], RouterBenchConfig(dtype="fp32", device="cpu"), CPU)

    def chosen(mode: str, trial: Trial) -> torch.Tensor:
        moe = router_bench.build_moe(trial.shape, trial.weights, router_bench.MODES[mode])
        return moe.router(trial.x, trial.state).expert_ids

    timed = with_equal_choices(drawn)
    assert not torch.equal(chosen(mode, drawn), chosen("plain", drawn))
    assert torch.equal(chosen(mode, timed), chosen("plain", drawn))
    # One factor for a cluster, and not the same for all of them.
    assert (timed.state.scale == timed.state.scale[:, :1]).all()
    assert timed.state.scale[:, 0].unique().numel() == SHAPES["tiny"].num_experts


def test_layers_are_timed_with_the_experts_of_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = []
    monkeypatch.setattr(router_bench, "both_passes", lambda _, trial: given.append(trial.state))
    config = RouterBenchConfig(shapes=("tiny",), repeat=2, device="cpu", dtype="fp32")
    trial = draw_trial(SHAPES["tiny"], config, CPU)
    router_bench.prepare("batch", trial, config)["batch", BOTH].action()
    wanted = with_equal_choices(trial).state.scale
    assert given and all(torch.equal(state.scale, wanted) for state in given)


def test_graphs_and_compilation_are_refused_on_a_cpu() -> None:
    with pytest.raises(UserError, match="device=cpu"):
        bench_router(RouterBenchConfig(graph=True, device="cpu"))
