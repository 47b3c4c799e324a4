"""`acmoe train` with its blocks on several processes computes what one process computes.

test_ranks_training.py has the case that runs by default, in float32.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import half_of
from launched import launch, ports
from pipeline_runs import INTERLEAVED, PLAIN, SAME, TWO, in_processes, interrupt, train64
from safetensors.torch import load_file
from torch import nn

import acmoe
from acmoe.distributed import start
from acmoe.evaluate.run import checkpoints
from acmoe.train.run import Summary
from acmoe.train.text import TextTrainer
from tiny_runs import records

Runs = dict[str, list[str]]


def several(rank: int, runs: Runs, folder: Path, free: list[int]) -> dict[str, Any]:
    """Train each run, by name, in one start of the processes, which costs more than the runs.

    In the run "stopped" rank 1 gets a signal, in "nan" and "raised" one of its blocks fails.
    """
    start.TIMEOUT = 60.0
    troubles = {"stopped": interrupt, "nan": put_nan, "raised": put_error}
    found: dict[str, Any] = {}
    for name, settings in runs.items():
        os.environ["MASTER_PORT"] = str(free.pop())
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and name in troubles:
                trouble_in_second_step(patch, troubles[name])
            found[name] = ending(lambda path=folder / name, own=settings: train64(path, *own))
    return found


def trouble_in_second_step(
    patch: pytest.MonkeyPatch, trouble: Callable[[TextTrainer], None]
) -> None:
    update = TextTrainer.update

    def troubled(trainer: TextTrainer, step: int, *, record: bool) -> Any:
        if step == 2:
            trouble(trainer)
        return update(trainer, step, record=record)

    patch.setattr(TextTrainer, "update", troubled)


def put_nan(trainer: TextTrainer) -> None:
    first = next(iter(trainer.model.blocks.values()))
    first.register_forward_hook(lambda module, given, out: (out[0] * float("nan"), out[1]))


def put_error(trainer: TextTrainer) -> None:
    def fail(module: nn.Module, given: Any) -> None:
        raise RuntimeError("this process has no memory left")

    next(iter(trainer.model.blocks.values())).register_forward_pre_hook(fail)


def ending(run: Callable[[], Summary]) -> Summary | str:
    try:
        return run()
    except SystemExit as end:
        return f"exit {end.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def assert_same_run(found: Path, expected: Path) -> None:
    """Compare losses, loads, validations, weights, moments and memory of all checkpoints."""
    pairs = list(zip(records(found), records(expected), strict=True))
    assert len(pairs) >= 6
    for one, other in pairs:
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, abs=1e-12), name
    folders = [checkpoints(run / "checkpoints") for run in (found, expected)]
    assert len(folders[0]) >= 2
    for one, other in zip(*folders, strict=True):
        tensors, wanted = (load_file(each / "training.safetensors") for each in (one, other))
        assert {key for key in tensors if "@" not in key} == wanted.keys()
        weights, expected_weights = (acmoe.load(each).state_dict() for each in (one, other))
        assert weights.keys() == expected_weights.keys()
        for key, value in (*wanted.items(), *expected_weights.items()):
            if not key.startswith("rng/"):
                near = {"rtol": 1e-9, "atol": 1e-12}
                torch.testing.assert_close({**tensors, **weights}[key], value, **near)


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """Train in one process, then in two; `into` is continued by two after three steps."""
    train64(folder / "one", *SAME)
    half_of(folder / "one", folder / "into")
    runs = {
        "two": [*SAME, TWO],
        "into": [*SAME, *INTERLEAVED],
    }
    return launch(2, several, runs, folder, ports(len(runs)), folder=folder / "results")


@pytest.fixture(scope="module")
def troubled(folder: Path) -> list[dict[str, Any]]:
    runs = {"stopped": [*SAME, TWO], "nan": [*SAME, *INTERLEAVED], "raised": [*SAME, TWO]}
    return launch(2, several, runs, folder, ports(len(runs)), folder=folder / "troubles")


@in_processes
def test_a_pipeline_trains_as_one_process(two: list[dict[str, Any]], folder: Path) -> None:
    assert_same_run(folder / "two", folder / "one")


@in_processes
def test_interleaved_stages_continue_a_run_of_one_process(
    two: list[dict[str, Any]], folder: Path
) -> None:
    assert_same_run(folder / "into", folder / "one")


@in_processes
def test_one_process_continues_a_pipeline(two: list[dict[str, Any]], folder: Path) -> None:
    half_of(folder / "two", folder / "back")
    train64(folder / "back", *SAME)
    assert_same_run(folder / "back", folder / "one")


@in_processes
def test_a_signal_to_one_stage_stops_all_at_the_same_step(
    troubled: list[dict[str, Any]], folder: Path
) -> None:
    for result in troubled:
        assert (result["stopped"].step, result["stopped"].signal) == (2, signal.SIGTERM)
    names = [each.name for each in checkpoints(folder / "stopped" / "checkpoints")]
    assert names == ["step-00000002"]


@in_processes
def test_a_stage_that_is_not_finite_stops_all_and_is_named(troubled: list[dict[str, Any]]) -> None:
    """Block 1 lies on rank 1; block 2, on rank 0, reads its output."""
    said = sorted((result["nan"] for result in troubled), key=len)
    assert said[0] == "exit 1"
    assert said[1].startswith("TrainingStopped: step 2 gave a loss or gradient that is not finite")
    assert "rank 1: blocks.1" in said[1]


@in_processes
def test_an_error_of_one_stage_ends_all(troubled: list[dict[str, Any]]) -> None:
    assert troubled[1]["raised"] == "RuntimeError: this process has no memory left"
    assert troubled[0]["raised"] == "exit 1"


CASES = {
    "batch": ["model.router.statistics=batch", "model.repeats=4"],
    "mix": ["model.router.mix=2", "model.router.detach=false", "model.router.statistics=batch"],
    "prefix": ["model.router.statistics=prefix", "model.norm=pre", "model.position=rope"],
    "chosen": ["model.router.statistics_of=current", "model.router.mean_over=chosen"],
    "published": ["model.empty_memory=zeros", "model.placement=skip-1", "split=4"],
    "dense": ["model.layers=ffn,ffn,moe,moe", "model.repeats=1"],
    "sgd": ["router_optimizer=sgd", "model.layers=ffn,moe", "model.repeats=2"],
    "many": ["batch=6", "split=6", "model.repeats=5", "clip=none"],
}


@in_processes
def test_every_kind_of_state_crosses_a_boundary(folder: Path) -> None:
    """The reader's statistics, mixed clusters with gradient, no MoE layer before the cut, ..."""
    runs: Runs = {}
    for name, settings in CASES.items():
        four = [] if any("repeats" in each for each in settings) else ["model.repeats=4"]
        clip = [each for each in PLAIN if not (name == "many" and each.startswith("clip"))]
        train64(folder / f"one-{name}", *clip, *four, *settings)
        runs[f"two-{name}"] = [*clip, *four, *settings, TWO]
        runs[f"interleaved-{name}"] = [*clip, *four, *settings, *INTERLEAVED]
    launch(2, several, runs, folder, ports(len(runs)), folder=folder / "crossed")
    for name in runs:
        assert_same_run(folder / name, folder / f"one-{name.partition('-')[2]}")
