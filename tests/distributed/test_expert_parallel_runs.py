"""Whole runs with experts shared by processes: the same losses and files as one process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import PLAIN_IMAGES, furthest, half_of, losses
from launched import launch_often, new_start
from loops import same_on_all_ranks
from safetensors.torch import load_file

from acmoe.distributed import start
from acmoe.evaluate.run import checkpoints
from acmoe.models.registry import build_model
from acmoe.train.run import train, train_images
from acmoe.train.text import TextTrainer
from tiny_runs import QUIET, byte_corpus, tiny_run
from tiny_vision_runs import tiny_vision_run

pytestmark = pytest.mark.slow
# Two micro-batches, gradients clipped, no dropout.
SAME = (
    *("steps=10", "batch=8", "log_every=1", "eval_every=5", "checkpoint_every=5", "clip=1.0"),
    *("model.dropout=0", "model.router.statistics_group=global"),
)
FOUR = "parallel.data=4"
RUNS = {
    "ddp": ("parallel.expert=4",),
    "replicated": ("parallel.expert=2",),
    "fsdp": ("parallel.expert=2", "parallel.shard=fsdp"),
}
CONTINUED = {  # copies of the first half of a run, by the settings that they go on with
    "one-replicated": ("one", RUNS["replicated"]),
    "one-fsdp": ("one", RUNS["fsdp"]),
    "replicated-fsdp": ("replicated", ("parallel.shard=fsdp",)),
    "fsdp-ddp": ("fsdp", RUNS["ddp"]),
}


@contextlib.contextmanager
def models_in(dtype: torch.dtype) -> Iterator[pytest.MonkeyPatch]:
    """Train models of this dtype inside `with`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "acmoe.train.text.trainer.build_model", lambda config: build_model(config).to(dtype)
        )
        yield patch


def runs(rank: int, folder: Path, dtype: torch.dtype) -> bool:
    """Train in all layouts; return True if running values are equal on all ranks at each step."""
    start.TIMEOUT = 120.0
    equal, update = [], TextTrainer.update

    def compared(trainer: TextTrainer, step: int, *, record: bool) -> Any:
        found = update(trainer, step, record=record)
        equal.append(same_on_all_ranks(trainer.model))
        return found

    def run(name: str, *settings: str) -> None:
        new_start()
        config = tiny_run(folder / "corpus", *SAME, FOUR, *settings)
        train(config, folder / name, console=QUIET)

    with models_in(dtype) as patch:
        patch.setattr(TextTrainer, "update", compared)
        for name, settings in RUNS.items():
            run(name, *settings)
        for name, (begun, settings) in CONTINUED.items():
            if rank == 0:
                half_of(folder / begun, folder / name)
            run(name, *settings)
    return len(equal) == 10 * len(RUNS) + 5 * len(CONTINUED) and all(equal)


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
def test_runs_of_four_processes_are_those_of_one(
    tmp_path: Path, dtype: torch.dtype, within: float
) -> None:
    """Losses, resumed in other layouts as well, and checkpoints in the format of one process."""
    torch.set_num_threads(1)
    byte_corpus(tmp_path)
    alone = tiny_run(tmp_path / "corpus", *SAME)
    with models_in(dtype):
        train(alone, tmp_path / "one", console=QUIET)
        equal = launch_often(4, runs, tmp_path, dtype, folder=tmp_path / "results")
        for name in RUNS:
            half_of(tmp_path / name, tmp_path / f"{name}-one")
            train(alone, tmp_path / f"{name}-one", console=QUIET)
    assert all(equal)
    for name in (*RUNS, *CONTINUED, *(f"{name}-one" for name in RUNS)):
        for kind, number in (("train", 10), ("valid", 2)):
            expected = losses(tmp_path / "one", kind)
            assert len(expected) == number
            assert furthest(losses(tmp_path / name, kind), expected) < within, name
    one = checkpoints(tmp_path / "one" / "checkpoints")[-1]
    for name in RUNS:
        found = checkpoints(tmp_path / name / "checkpoints")[-1]
        for file in ("weights-*.safetensors", "training.safetensors"):
            tensors, expected = (load_file(*folder.glob(file)) for folder in (found, one))
            own = [key for key in tensors if "@" not in key]  # generators of other processes
            assert own == list(expected)
            for key in own:
                assert tensors[key].shape == expected[key].shape
                assert tensors[key].dtype == expected[key].dtype


TWO = {"ddp": ("parallel.data=2",), "expert": ("parallel.data=2", "parallel.expert=2")}
DROPPING = tuple(each.replace("factor=none", "factor=0.5") for each in PLAIN_IMAGES)


def in_both_layouts(rank: int, folder: Path) -> None:
    """Train by DDP alone and with shared experts: images that experts drop, and text in bf16."""
    for name, layout in TWO.items():
        new_start()
        train_images(tiny_vision_run(*DROPPING, *layout), folder / f"drop-{name}", console=QUIET)
        new_start()
        settings = (*SAME, *layout, "precision=bf16", "split=1")
        train(tiny_run(folder / "corpus", *settings), folder / f"bf16-{name}", console=QUIET)


def test_shared_experts_give_the_losses_of_ddp(tmp_path: Path) -> None:
    """Rows beyond an expert's capacity are dropped by the process of their tokens, as in DDP."""
    byte_corpus(tmp_path)
    launch_often(2, in_both_layouts, tmp_path, folder=tmp_path / "results")
    for kind, within in (("drop", 1e-5), ("bf16", 0.02)):
        for record in ("train", "valid"):
            ddp, expert = (losses(tmp_path / f"{kind}-{name}", record) for name in TWO)
            assert furthest(ddp, expert) < within
            assert len(ddp) > 0
