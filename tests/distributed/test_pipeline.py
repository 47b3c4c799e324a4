"""`acmoe train` with its blocks on several processes computes what one process computes.

test_ranks_training.py has the case that runs by default, in float32.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import half_of
from launched import launch, ports
from loops import buffers_of
from safetensors.torch import load_file
from torch import nn

import acmoe
from acmoe.distributed import start
from acmoe.evaluate.run import checkpoints
from acmoe.models.registry import AFTER_BUILD
from acmoe.runtime import seeded
from acmoe.train.run import Summary, train
from acmoe.train.text import TextTrainer, checked_corpus, text_trainer
from tiny_runs import QUIET, byte_corpus, records, tiny_run

# Two micro-batches, gradients clipped. Without dropout: every process draws its own.
SHORT = ("steps=6", "log_every=1", "eval_every=3", "checkpoint_every=3", "keep=9", "clip=1.0")
PLAIN = (*SHORT, "model.dropout=0")
SAME = (*PLAIN, "model.repeats=4")
TWO = "parallel.pipeline=2"
INTERLEAVED = (TWO, "parallel.schedule=interleaved")

Runs = dict[str, list[str]]


def in_processes(test: Any) -> Any:
    """Mark a test that starts several processes."""
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    return pytest.mark.slow(pytest.mark.skipif(old, reason="needs torch 2.13")(test))


def train64(folder: Path, *settings: str) -> Summary:
    """Train in float64, in this process alone or with the others that were launched."""
    AFTER_BUILD.append(nn.Module.double)
    try:
        return train(tiny_run(folder.parent / "corpus", *settings), folder, console=QUIET)
    finally:
        AFTER_BUILD.remove(nn.Module.double)


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


def interrupt(trainer: TextTrainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    byte_corpus(folder)
    return folder


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


def shares_and_stages(rank: int, folder: Path, free: list[int]) -> dict[str, Any]:
    """Train ten steps with two shares of the batch and two stages; return losses and buffers."""
    start.TIMEOUT = 60.0
    AFTER_BUILD.append(nn.Module.double)
    found: dict[str, Any] = {}
    for name, settings in FOUR.items():
        os.environ["MASTER_PORT"] = str(free.pop())
        config = tiny_run(folder / "corpus", *settings, "parallel.data=2")
        with (
            start.joined(config.parallel, "cpu") as (ranks, device),
            seeded(config.seed, device),
            closing(text_trainer(config, checked_corpus(config), device, ranks)) as trainer,
        ):
            losses, buffers = [], []
            for step in range(1, 11):
                losses.append(float(trainer.update(step, record=step % 2 == 0).loss))
                buffers.append(buffers_of(trainer.model))
        found[name] = losses, buffers
    return found


EIGHT = ["batch=8", "model.repeats=4", "model.dropout=0", "clip=1.0"]
EIGHT += ["model.router.statistics_group=global"]
FOUR = {
    "running": [*EIGHT, TWO],
    "batch": [*EIGHT, TWO, "model.router.statistics=batch"],
    "interleaved": [*EIGHT, *INTERLEAVED],
}


@in_processes
def test_two_shares_and_two_stages_train_as_one_process(folder: Path) -> None:
    """Ranks 0 and 1 have the first stage, 2 and 3 the second; buffers of a stage are bitwise equal.

    Statistics over all processes: `batch` measures the tokens of both shares.
    """
    results = launch(4, shares_and_stages, folder, ports(3), folder=folder / "four")
    for name, settings in FOUR.items():
        alone = [each for each in settings if not each.startswith("parallel")]
        AFTER_BUILD.append(nn.Module.double)
        config = tiny_run(folder / "corpus", *alone)
        with seeded(config.seed, torch.device("cpu")):
            trainer = TextTrainer(config, checked_corpus(config), torch.device("cpu"))
            expected = [float(trainer.update(step, record=False).loss) for step in range(1, 11)]
        AFTER_BUILD.remove(nn.Module.double)
        for rank in range(4):
            losses, buffers = results[rank][name]
            assert losses == pytest.approx(expected, abs=1e-12)
            twin = results[rank ^ 1][name][1]
            for own, others in zip(buffers, twin, strict=True):
                assert len(own) > 0
                assert all(map(torch.equal, own, others))


@in_processes
def test_a_pipeline_of_one_share_is_continued_with_two(folder: Path) -> None:
    """Memory of streams and random generators: 1 x 2 processes, then 2 x 2, then 2 x 1, then 1."""
    train64(folder / "whole", *SAME, *EIGHT[:1], *EIGHT[-1:])
    (folder / "moved").mkdir()
    shutil.copytree(folder / "corpus", folder / "moved" / "corpus")
    sequence = [(2, [TWO]), (4, [TWO, "parallel.data=2"]), (2, ["parallel.data=2"])]
    for number, (world, settings) in enumerate(sequence):
        run = [*SAME, *EIGHT[:1], *EIGHT[-1:], *settings]
        launch(
            *(world, moved, folder / "moved", run, number + 2, ports(1)),
            folder=folder / f"moved-{number}",
        )
    train64(folder / "moved" / "run", *SAME, *EIGHT[:1], *EIGHT[-1:])
    pairs = zip(records(folder / "moved" / "run"), records(folder / "whole"), strict=True)
    for found, expected in pairs:
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-12)


def moved(rank: int, folder: Path, settings: list[str], last: int, free: list[int]) -> None:
    """Continue a run until the step `last`, and stop it there by a signal."""
    os.environ["MASTER_PORT"] = str(free.pop())
    update = TextTrainer.update

    def stopped(trainer: TextTrainer, step: int, *, record: bool) -> Any:
        if step == last:
            interrupt(trainer)
        return update(trainer, step, record=record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextTrainer, "update", stopped)
        train64(folder / "run", *settings)


@in_processes
def test_torchrun_starts_a_pipeline_with_dropout(folder: Path) -> None:
    settings = [
        *("model.dim=16", "model.heads=2", "model.hidden=16", "model.span=24", "model.block=16"),
        *("batch=8", "split=4", "steps=4", "eval_batch=2", "eval_tokens=200", "device=cpu"),
        *("data.name=bytes", f"data.folder={folder / 'corpus'}", "parallel.data=2", TWO),
    ]
    said = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "4", "-m", "acmoe", "train", "--out", str(folder / "torchrun")),
            *("switch-nano-acmoe", *settings),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert "done: 4 steps" in said.stdout
