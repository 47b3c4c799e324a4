"""Short runs with their blocks on two processes, in float64."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acmoe.models.registry import AFTER_BUILD
from acmoe.train.run import Summary, train
from acmoe.train.text import TextTrainer
from tiny_runs import QUIET, tiny_run

# Two micro-batches, gradients clipped. Without dropout: every process draws its own.
SHORT = ("steps=6", "log_every=1", "eval_every=3", "checkpoint_every=3", "keep=9", "clip=1.0")
PLAIN = (*SHORT, "model.dropout=0")
SAME = (*PLAIN, "model.repeats=4")
TWO = "parallel.pipeline=2"
INTERLEAVED = (TWO, "parallel.schedule=interleaved")


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


def interrupt(trainer: TextTrainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
