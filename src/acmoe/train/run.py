"""Train a language model or an image classifier in a run folder."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from acmoe.config.images.train import VisionRunConfig
from acmoe.config.text.train import RunConfig
from acmoe.data.images.load import load_images
from acmoe.distributed.ranks import Ranks
from acmoe.distributed.start import joined
from acmoe.evaluate.run import CHECKPOINTS
from acmoe.evaluate.starts import record_start
from acmoe.runtime import seeded
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.display import Display
from acmoe.train.images import ImageTrainer, check_images, probe_validation
from acmoe.train.loop import TrainLoop
from acmoe.train.run_folder import check_free, claim
from acmoe.train.signals import StopSignals
from acmoe.train.text import checked_corpus, text_trainer
from acmoe.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The state of a run after a call of `train` or `train_images`."""

    folder: Path
    step: int  # updates done, by all calls together
    steps: int  # updates of the whole run
    signal: int | None  # the signal that stopped the run before its last step
    seconds: float  # training time, of all calls together
    metric: str
    best: float | None  # best score of the validation split, in units of the metric
    best_step: int | None
    rank: int = 0  # rank of this process; all other fields are the same in all processes

    @property
    def message(self) -> str:
        """Return one line that says how the training ended, and where it is saved."""
        if self.step < self.steps:
            return (
                f"stopped at step {self.step} of {self.steps}, saved in {self.folder}; give the "
                "same command again to continue"
            )
        best = "" if self.best is None else f", best {self.metric} {self.best:.4f}"
        at = "" if self.best_step is None else f" at step {self.best_step}"
        return f"done: {self.steps} steps in {self.seconds:.0f} s{best}{at} ({self.folder})"


def train(
    config: RunConfig, folder: Path | str, *, console: Console | None = None, note: str = ""
) -> Summary:
    """Train a language model in `folder`, or continue the run there; the same call does both.

    `note` is a line for the log.

    Raises:
        TrainingStopped: the loss or gradient is no longer finite.
        UserError: the folder belongs to another run or process, or the corpus does not fit.
    """
    folder = Path(folder)
    with (
        joined(config.parallel, config.device) as (ranks, device),
        _display(ranks, folder, config.steps, console, note) as display,
    ):
        return _train_text(config, folder, display, StopSignals(), ranks, device)


def train_with(config: RunConfig, folder: Path, display: Display, signals: StopSignals) -> Summary:
    """Train as `train` does, with that display, until that object has received a stop signal."""
    with joined(config.parallel, config.device) as (ranks, device):
        return _train_text(config, folder, display, signals, ranks, device)


def _train_text(
    config: RunConfig,
    folder: Path,
    display: Display,
    signals: StopSignals,
    ranks: Ranks,
    device: torch.device,
) -> Summary:
    with ranks.first_before_others():  # the first may write the corpus
        if ranks.first:  # it alone writes the folder, which other machines may not have
            check_free(folder, config)
        corpus = checked_corpus(config)
    with (
        _claimed(ranks, folder, config, corpus.vocabulary),
        seeded(config.seed, device),
        signals,
        contextlib.closing(text_trainer(config, corpus, device, ranks)) as trainer,
    ):
        return _train(trainer, folder, display, signals)


def train_images(
    config: VisionRunConfig, folder: Path | str, *, console: Console | None = None, note: str = ""
) -> Summary:
    """Train an image classifier in `folder`, or continue the run there; the same call does both.

    `note` is a line for the log.

    Raises:
        TrainingStopped: the loss or gradient is no longer finite.
        UserError: the folder belongs to another run or process, or the images do not fit.
    """
    folder = Path(folder)
    with joined(config.parallel, config.device) as (ranks, device):
        with ranks.first_before_others():
            if ranks.first:
                check_free(folder, config)
            images = load_images(config.data, warn=ranks.first)
            check_images(config, images)
            if ranks.first:
                probe_validation(config, images)
        with (
            seeded(config.seed, device),
            StopSignals() as signals,
            # Built before the folder is claimed: a config with mistakes is not written down.
            contextlib.closing(ImageTrainer(config, images, device, ranks)) as trainer,
            _claimed(ranks, folder, config),
            _display(ranks, folder, trainer.steps, console, note) as display,
        ):
            return _train(trainer, folder, display, signals)


@contextlib.contextmanager
def _claimed(ranks: Ranks, folder: Path, *contents: Any) -> Iterator[None]:
    """Lock the folder for all processes; the first one does it."""
    with claim(folder, *contents) if ranks.first else contextlib.nullcontext():
        ranks.wait()
        yield


def _display(ranks: Ranks, folder: Path, steps: int, console: Console | None, note: str) -> Display:
    shown = console if ranks.first else Console(quiet=True)
    return Display(folder.name, steps, shown, note=note)


def _train(trainer: Trainer, folder: Path, display: Display, signals: StopSignals) -> Summary:
    """Train to the end or a stop signal, in a claimed folder."""
    log, ranks = trainer.metrics_log(folder), trainer.ranks
    log.writes = ranks.first
    keep = trainer.config.keep

    def started(step: int) -> None:
        if ranks.first and step < trainer.steps:
            record_start(folder, trainer.device, step=step, processes=ranks.size)

    store = CheckpointStore(folder / CHECKPOINTS, keep=keep, writes=ranks.first)
    loop = TrainLoop(
        trainer=trainer,
        log=log,
        store=store,
        display=display,
        signals=signals,
        started=started,
    )
    try:
        step = loop.run()
    except KeyboardInterrupt:
        raise store.interrupted() from None
    return Summary(
        folder=folder,
        step=step,
        steps=trainer.steps,
        signal=loop.signal_at(step),
        seconds=log.seconds,
        metric=log.metric,
        best=log.best_value,
        best_step=log.best_step,
        rank=ranks.rank,
    )
