"""Training an image classifier; `Course.run` is the loop."""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from acmoe.config.images.train import VisionRunConfig
from acmoe.data.images.load import load_images
from acmoe.data.images.splits import ImageSplits
from acmoe.errors import check
from acmoe.evaluate.run import CHECKPOINTS
from acmoe.models.checkpoint import load
from acmoe.runtime import pick_device, seeded
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.course import Course
from acmoe.train.display import Display
from acmoe.train.interrupt import Interrupts
from acmoe.train.journal import Journal, Record
from acmoe.train.optim import optimizer_tensors, restore_optimizer
from acmoe.train.resume import restore_rng, rng_tensors
from acmoe.train.run_folder import claim
from acmoe.train.summary import Summary
from acmoe.train.vision_step import VisionTrainer, check_images


def train_images(
    config: VisionRunConfig, folder: Path | str, *, console: Console | None = None
) -> Summary:
    """Train in `folder`, or continue what is there; the same call does both.

    Raises:
        TrainingStopped: the loss is no finite number any more.
        UserError: the folder belongs to another run or process, or the images do not fit.
    """
    folder, device = Path(folder), pick_device(config.device)
    images = load_images(config.data)
    check_images(config, images)
    with (
        seeded(config.seed, device),
        Interrupts() as asked,
        contextlib.closing(VisionTrainer(config, images, device)) as trainer,
    ):
        steps = trainer.pace.steps
        # Whatever is wrong with the config has been said by now: it is not written down.
        with claim(folder, config), Display(folder.name, steps, console) as display:
            journal = ImageJournal(folder, "validation top-1 (%)")
            store = CheckpointStore(folder / CHECKPOINTS, keep=config.keep)
            course = Course(
                trainer=trainer,
                journal=journal,
                store=store,
                display=display,
                asked=asked,
                steps=steps,
                validate=trainer.validate,
                save=lambda step: _save(store, step, trainer, journal),
            )
            step = course.run(_resume(store, trainer, journal))
    return Summary.of(folder, steps, journal, step, course.signal_at(step))


class ImageJournal(Journal):
    """The best checkpoint is that of the highest accuracy, among equals of the lowest loss."""

    unit = "images"
    ranked = ("loss", "top1")

    def rank(self, score: Mapping[str, Any]) -> tuple[float, ...]:
        return (-score["top1"], score["loss"])

    def figures(self, loss: float) -> Record:
        """Nothing: of mixed images and smoothed labels a loss says no more than itself."""
        return {}

    @property
    def best_value(self) -> float | None:
        return None if self.best is None else self.best["top1"]


def _save(store: CheckpointStore, step: int, trainer: VisionTrainer, journal: Journal) -> None:
    """A checkpoint of everything a step changes."""
    tensors = optimizer_tensors(trainer.optimizer, trainer.model) | rng_tensors(trainer.device)
    state = {
        **journal.state_dict(),
        "data": trainer.batches.state_dict(),
        "labels_sha256": _labels(trainer.images),
    }
    store.save(step, trainer.model, tensors, state)


def _resume(store: CheckpointStore, trainer: VisionTrainer, journal: Journal) -> int:
    """Continue from the latest checkpoint, if there is one; the step it was made after."""
    folder = store.latest()
    if folder is None:
        journal.open(0)
        return 0
    tensors, state = store.read(folder)
    check(
        state["labels_sha256"] == _labels(trainer.images),
        f"{trainer.images.train.title} are not the images this run was begun with (other labels); "
        "restore those, or choose another run folder",
    )
    trainer.model.load_state_dict(load(folder).state_dict())
    restore_optimizer(trainer.optimizer, trainer.model, tensors)
    trainer.batches.load_state_dict(state["data"])
    restore_rng(tensors, trainer.device)
    journal.load_state_dict(state)
    step = cast(int, state["step"])
    journal.open(step)
    return step


def _labels(images: ImageSplits) -> str:
    """Tells one set of training images from another without reading its pixels."""
    return hashlib.sha256(images.train.labels.tobytes()).hexdigest()
