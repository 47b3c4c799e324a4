"""Several processes for each stage of a pipeline, with a share of the batch each."""

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import launch, ports
from loops import buffers_of
from pipeline_runs import INTERLEAVED, SAME, TWO, in_processes, interrupt, train64
from torch import nn

from acmoe.distributed import start
from acmoe.models.registry import AFTER_BUILD
from acmoe.runtime import seeded
from acmoe.train.text import TextTrainer, checked_corpus, text_trainer
from tiny_runs import records, tiny_run


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
