"""Training on a GPU: the host never waits inside a step, and the numbers are the CPU's."""

from pathlib import Path

import pytest
import torch
from interrupted_updates import killed_after

from acmoe.evaluate.run import open_corpus
from acmoe.train.run import train
from acmoe.train.text import TextTrainer
from tiny_runs import QUIET, byte_corpus, records, tiny_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    # torch 2.11's compiler looks at the gradient of every input.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # float32 stays float32
]


@pytest.mark.parametrize("overrides", [(), ("clip=1.0", "precision=bf16"), ("split=4",)])
def test_a_step_never_waits_for_the_device(overrides: tuple[str, ...], tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "device=cuda", *overrides)
    trainer = TextTrainer(config, open_corpus(config.data), torch.device("cuda"))
    for step in range(1, 4):  # lets libraries and allocators settle
        trainer.update(step, record=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(4, 8):
            trainer.update(step, record=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_losses_are_those_of_the_cpu(tmp_path: Path) -> None:
    corpus = byte_corpus(tmp_path)
    losses = []
    for device in ("cpu", "cuda"):
        config = tiny_run(corpus, f"device={device}", "model.dropout=0", "lr=1e-3", "log_every=1")
        train(config, tmp_path / device, console=QUIET)
        losses.append([line["loss"] for line in records(tmp_path / device)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("flags", [(), ("compile=true",), ("compile=true", "precision=bf16")])
def test_a_run_finishes_and_continues(flags: tuple[str, ...], tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "device=cuda", *flags)
    summary = train(config, tmp_path / "run", console=QUIET)
    assert summary.step == 20
    assert train(config, tmp_path / "run", console=QUIET).best == summary.best
    losses = [line["loss"] for line in records(tmp_path / "run") if line["kind"] == "train"]
    assert losses[-1] < losses[0]


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in records(folder)]


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dropout=0",),
        ("model.dropout=0", "precision=bf16", "clip=1.0", "split=1"),
        ("model.dropout=0", "model.router=stable"),
        ("model.dropout=0", "model.router.statistics=prefix"),
    ],
)
def test_replayed_updates_are_the_updates(overrides: tuple[str, ...], tmp_path: Path) -> None:
    # 60 lines are a pass of a few dozen blocks: memory is forgotten and filled again on the way.
    corpus = byte_corpus(tmp_path, lines=60)
    # The learning rate is float64 on one side and float32 on the other, so these are powers of two:
    # one that is rounded changes bf16 losses by a percent within 60 steps.
    steps = ("steps=60", "log_every=3", "lr=0.0078125", "warmup=4", "schedule=constant")
    for name in ("false", "true"):
        config = tiny_run(corpus, "device=cuda", f"graph={name}", *steps, *overrides)
        train(config, tmp_path / name, console=QUIET)
    assert losses_of(tmp_path / "true") == pytest.approx(losses_of(tmp_path / "false"), rel=1e-4)


def test_a_replayed_run_continues_to_the_same_numbers(tmp_path: Path) -> None:
    corpus = byte_corpus(tmp_path)
    config = tiny_run(corpus, "device=cuda", "graph=true", "steps=40", "checkpoint_every=14")
    whole = train(config, tmp_path / "whole", console=QUIET)
    # A stop signal, of a time limit say, would end this run early and not the process.
    assert whole.signal is None and whole.step == whole.steps
    part = tiny_run(corpus, "device=cuda", "graph=true", "steps=40", "checkpoint_every=14")
    with killed_after(TextTrainer, 20):
        train(part, tmp_path / "part", console=QUIET)
    train(part, tmp_path / "part", console=QUIET)
    assert records(tmp_path / "part") == records(tmp_path / "whole")


def test_a_replayed_step_never_waits_for_the_device(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "device=cuda", "graph=true")
    trainer = TextTrainer(config, open_corpus(config.data), torch.device("cuda"))
    for step in range(1, 10):
        trainer.update(step, record=False)
    assert trainer.graph is not None and trainer.graph.captured
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(10, 14):
            trainer.update(step, record=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
