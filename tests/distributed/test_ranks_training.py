"""`acmoe train` on two processes: it computes what one process computes, and ends as one."""

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import PLAIN_IMAGES, furthest, half_of, losses
from launched import ending, launch_often, new_start
from safetensors.torch import load_file

import acmoe
from acmoe.config.images.data import ImageEvaluateConfig
from acmoe.config.parallel import ParallelConfig
from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.config.text.train import RunConfig
from acmoe.distributed import start
from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.evaluate.images.run import RunReport, evaluate_image_run
from acmoe.evaluate.language import evaluate
from acmoe.evaluate.language_report import LanguageReport
from acmoe.evaluate.run import checkpoints, open_image_run
from acmoe.train.run import Summary, train, train_images
from acmoe.train.text import TextTrainer, checked_corpus
from slow_cases import mostly_slow
from tiny_runs import QUIET, records, tiny_run
from tiny_vision_runs import tiny_vision_run

# Two micro-batches, gradients clipped. Without dropout: every process draws its own.
SHORT = ("steps=4", "log_every=1", "eval_every=2", "checkpoint_every=2", "eval_tokens=64")
SAME = (
    *SHORT,
    "clip=1.0",
    "model.dropout=0",
)
GLOBAL = (*SAME, "model.router.statistics_group=global")
TWO = "parallel.data=2"
EVALUATION = EvaluateConfig(statistics=("running", "batch"), batch=4, routing=True)
SENDS_INTEGERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
PIPELINE = pytest.param(
    "pipeline", marks=pytest.mark.skipif(not SENDS_INTEGERS, reason="needs torch 2.13")
)


def many(rank: int, folder: Path) -> dict[str, Any]:
    """Run all cases in one start of the processes, which costs more than the cases."""
    start.TIMEOUT = 60.0
    corpus = folder / "corpus"

    def run(name: str, *settings: str, router: str = "adaptive") -> Summary:
        new_start()
        return train(tiny_run(corpus, *settings, router=router), folder / name, console=QUIET)

    found: dict[str, Any] = {
        "ddp": run("ddp", *GLOBAL, TWO),
        "fsdp": run("fsdp", *GLOBAL, TWO, "parallel.shard=fsdp"),
        "expert": run("expert", *GLOBAL, TWO, "parallel.expert=2"),
        "async": run("async", *GLOBAL, TWO, "parallel.shard=fsdp", "parallel.save=async"),
        "resumed": run("alone-two", *GLOBAL, TWO, "parallel.shard=fsdp"),
        "dropout": run("dropout", *SHORT, TWO),
    }
    if SENDS_INTEGERS:
        found["pipeline"] = run("pipeline", *GLOBAL, "parallel.pipeline=2")
    if rank == 0:
        half_of(folder / "dropout", folder / "dropout-again")
    found["again"] = run("dropout-again", *SHORT, TWO)
    found["stopped"] = interrupted(rank, lambda: run("stopped", *SHORT, TWO))
    found["runners"] = [
        why_plain(tiny_run(corpus, TWO, f"parallel.shard={shard}")) for shard in ("ddp", "fsdp")
    ]
    found["evaluated"] = evaluated(folder)
    found["nan"] = ending(lambda: broken(rank, lambda: run("nan", *SHORT, TWO), nan_hook))
    found["raised"] = ending(lambda: broken(rank, lambda: run("raised", *SHORT, TWO), raising_hook))
    return found


def why_plain(config: RunConfig) -> str | None:
    """Return the reason why a trainer's model would not run on its fast path, or None."""
    new_start()
    with (
        start.joined(config.parallel, config.device) as (ranks, device),
        closing(TextTrainer(config, checked_corpus(config), device, ranks)) as trainer,
    ):
        return acmoe.fast.explain(trainer.model)


def evaluated(folder: Path) -> LanguageReport:
    """Evaluate a run by all processes, as `acmoe evaluate` under torchrun does."""
    new_start()
    with start.joined(ParallelConfig(data=2), "cpu") as (ranks, _):
        return evaluate(folder / "alone", EVALUATION, device="cpu", ranks=ranks)


def images(rank: int, folder: Path, *settings: str) -> RunReport:
    """Train on images, then evaluate the run by all processes."""
    new_start()
    train_images(tiny_vision_run(*PLAIN_IMAGES, TWO, *settings), folder / "two", console=QUIET)
    new_start()
    with start.joined(ParallelConfig(data=2), "cpu") as (ranks, _):
        return evaluated_images(folder / "two", ranks)


def evaluated_images(run: Path, ranks: Ranks) -> RunReport:
    config = ImageEvaluateConfig(batch=16, routing=True)
    return evaluate_image_run(open_image_run(run), config, device="cpu", ranks=ranks)


def interrupted(rank: int, run: Any) -> Summary:
    """Send SIGTERM to rank 1 in its second step."""
    update = TextTrainer.update

    def with_signal(trainer: TextTrainer, step: int, *, record: bool) -> Any:
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(trainer, step, record=record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextTrainer, "update", with_signal)
        return run()


def broken(rank: int, run: Any, hook: Any) -> Summary:
    """Put a hook on a block of rank 1 before its second step."""
    update = TextTrainer.update

    def with_hook(trainer: TextTrainer, step: int, *, record: bool) -> Any:
        if rank == 1 and step == 2:
            trainer.model.blocks[1].register_forward_hook(hook)
        return update(trainer, step, record=record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextTrainer, "update", with_hook)
        return run()


def nan_hook(module: Any, arguments: Any, output: Any) -> Any:
    return output[0] * float("nan"), output[1]


def raising_hook(module: Any, arguments: Any, output: Any) -> Any:
    raise RuntimeError("this process has no memory left")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """Return the results of both processes; `alone` and `alone-two` were begun by one process."""
    train(tiny_run(folder / "corpus", *GLOBAL), folder / "alone", console=QUIET)
    half_of(folder / "alone", folder / "alone-two")
    return launch_often(2, many, folder, folder=folder / "results")


@pytest.mark.parametrize("name", ["ddp", "fsdp", "expert", "alone-two", PIPELINE])
def test_two_processes_train_as_one(two: list[dict[str, Any]], folder: Path, name: str) -> None:
    """With statistics over all processes; `alone-two` is the second half of a run of one."""
    assert len(losses(folder / name)) == 4
    assert furthest(losses(folder / name), losses(folder / "alone")) < 1e-5
    valid = furthest(losses(folder / name, "valid"), losses(folder / "alone", "valid"))
    assert valid < 1e-5


def test_an_evaluation_by_two_processes_is_that_of_one(
    two: list[dict[str, Any]], folder: Path
) -> None:
    """Scores, loads and instability; rows are dealt for `running`, and not for `batch`."""
    expected = evaluate(folder / "alone", EVALUATION, device="cpu")
    assert two[0]["evaluated"] == two[1]["evaluated"]
    for found, one in zip(two[0]["evaluated"].figures, expected.figures, strict=True):
        assert (found.statistics, found.tokens) == (one.statistics, one.tokens)
        assert found.loss == pytest.approx(one.loss, abs=1e-6)
        assert found.layers == one.layers
        assert len(one.layers) == 3


def test_loads_and_auxiliary_losses_are_of_all_processes(
    two: list[dict[str, Any]], folder: Path
) -> None:
    for found, expected in zip(records(folder / "ddp"), records(folder / "alone"), strict=True):
        if found["kind"] == "train":
            assert found["load_balance"] == pytest.approx(expected["load_balance"], abs=1e-6)
            assert found["aux_loss"] == pytest.approx(expected["aux_loss"], abs=1e-6)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "expert", PIPELINE])
def test_a_checkpoint_of_two_processes_is_that_of_one(
    two: list[dict[str, Any]], folder: Path, name: str
) -> None:
    parts = [checkpoints(folder / run / "checkpoints")[0] for run in (name, "alone")]
    found, expected = (load_file(part / "training.safetensors") for part in parts)
    extra = {key for key in found if "@" in key}  # the random generators of other processes
    assert extra == {"rng/cpu@1"}
    assert found.keys() - extra == expected.keys()
    for key in expected:
        assert found[key].shape == expected[key].shape
        if not key.startswith("rng/"):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=1e-5)
    found, expected = (acmoe.load(part).state_dict() for part in parts)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


@mostly_slow("name", ["ddp", "fsdp", "expert", "async", PIPELINE], keep={1, 3})
def test_one_process_continues_a_run_of_two(
    two: list[dict[str, Any]], folder: Path, name: str
) -> None:
    parts = list((folder / name / "checkpoints").glob("*/shards/*"))
    assert len(parts) == (4 if name == "async" else 0)  # of two processes, in two checkpoints
    half_of(folder / name, folder / f"{name}-one")
    train(tiny_run(folder / "corpus", *GLOBAL), folder / f"{name}-one", console=QUIET)
    assert furthest(losses(folder / f"{name}-one"), losses(folder / "alone")) < 1e-5


def test_the_same_number_of_processes_resumes_bit_by_bit(
    two: list[dict[str, Any]], folder: Path
) -> None:
    """With dropout: the random generator of every process is saved."""
    assert losses(folder / "dropout-again") == losses(folder / "dropout")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", ["parallel.shard=ddp", "parallel.shard=fsdp", "parallel.expert=2"]
)
def test_images_are_trained_and_scored_as_by_one_process(tmp_path: Path, sharding: str) -> None:
    reports = launch_often(2, images, tmp_path, sharding, folder=tmp_path / "results")
    train_images(tiny_vision_run(*PLAIN_IMAGES), tmp_path / "one", console=QUIET)
    two, one = tmp_path / "two", tmp_path / "one"
    for kind in ("train", "valid"):
        assert furthest(losses(two, kind), losses(one, kind)) < 1e-5
    found, expected = (
        [record["top1"] for record in records(run) if record["kind"] == "valid"]
        for run in (two, one)
    )
    assert found == expected
    alone = evaluated_images(two, ALONE).report.figures[0]
    assert alone.layers
    for report in reports:
        figure = report.report.figures[0]
        assert (figure.top1, figure.layers) == (alone.top1, alone.layers)
        assert figure.loss == pytest.approx(alone.loss, abs=1e-6)


def test_a_signal_to_one_process_stops_all_at_the_same_step(
    two: list[dict[str, Any]], folder: Path
) -> None:
    for result in two:
        assert (result["stopped"].step, result["stopped"].signal) == (2, signal.SIGTERM)
    assert [each.name for each in checkpoints(folder / "stopped" / "checkpoints")] == [
        "step-00000002"
    ]


def test_a_value_that_is_not_finite_on_one_process_stops_all(two: list[dict[str, Any]]) -> None:
    said = [result["nan"] for result in two]
    assert sorted(text[:7] for text in said) == ["Trainin", "exit 1"]
    message = max(said, key=len)
    assert message.startswith("TrainingStopped: step 2 gave a loss or gradient that is not finite")
    assert "rank 1: blocks.1" in message


def test_an_error_of_one_process_ends_all(two: list[dict[str, Any]]) -> None:
    assert two[1]["raised"] == "RuntimeError: this process has no memory left"
    assert two[0]["raised"] == "exit 1"


def test_the_fast_runner_serves_ddp_and_declines_fsdp(two: list[dict[str, Any]]) -> None:
    whole, sharded = two[0]["runners"]
    assert whole is None
    assert sharded == "blocks.0 is a FSDPPostNormBlock, not a PostNormBlock"


def test_only_one_process_writes_and_speaks(two: list[dict[str, Any]], folder: Path) -> None:
    assert [result["ddp"].rank for result in two] == [0, 1]
    steps = [record["step"] for record in records(folder / "ddp") if record["kind"] == "train"]
    assert steps == list(range(1, 5))
