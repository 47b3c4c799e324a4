"""Training on a GPU: the host never waits inside a step, and the numbers are the CPU's."""

from pathlib import Path

import pytest
import torch

from acmoe.evaluate.run import open_corpus
from acmoe.train.loop import train
from acmoe.train.step import Trainer
from tiny_runs import QUIET, byte_corpus, records, tiny_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("overrides", [(), ("clip=1.0", "precision=bf16"), ("split=4",)])
def test_a_step_never_waits_for_the_device(overrides: tuple[str, ...], tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "device=cuda", *overrides)
    trainer = Trainer(config, open_corpus(config.data), torch.device("cuda"))
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
