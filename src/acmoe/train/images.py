"""Training updates of an image classifier.

B images, K classes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from acmoe.config.images.data import ImageEvaluateConfig
from acmoe.config.images.train import VisionRunConfig
from acmoe.data.images.augment import Augment
from acmoe.data.images.batches import EvaluationImages, ImageBatch, TrainingImages
from acmoe.data.images.on_device import DeviceImages, training_images
from acmoe.data.images.probe import probe_images
from acmoe.data.images.splits import ImageSplits
from acmoe.data.sharding import rank_rows
from acmoe.data.transfer import to_device
from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.errors import check
from acmoe.evaluate.images.accuracy import ImageFigure, ImageReport, evaluate_images
from acmoe.evaluate.same_data import classes_sha256, labels_sha256
from acmoe.models.images.classifier import ImageClassifier, VisionOutput
from acmoe.models.registry import build_model
from acmoe.routing.process_group import measuring_alone
from acmoe.runtime import autocast
from acmoe.train.ema import WeightAverage
from acmoe.train.metrics_log import ImageMetricsLog, MetricsLog
from acmoe.train.trainer import Trainer, eager


class ImageValidation(NamedTuple):
    """A score of the validation images, and the settings it depends on."""

    loss: float  # mean nats per image
    top1: float  # percent
    top5: float | None  # percent; None where there are no more than five classes
    images: int
    statistics: str
    batch: int
    capacity: float | None = None  # capacity factor of the experts; None: no token is dropped
    # The same scores of the moving average of the weights; None where the run keeps none.
    ema_loss: float | None = None
    ema_top1: float | None = None
    ema_top5: float | None = None


class ImageSchedule(NamedTuple):
    """A learning-rate schedule in updates, for a run whose length may be given in epochs."""

    lr: float
    min_lr: float
    schedule: str
    steps: int
    warmup: int


class ImageTrainer(Trainer):
    """Updates of an image classifier on augmented images."""

    config: VisionRunConfig
    model: ImageClassifier
    batches: TrainingImages | DeviceImages
    recent: list[ImageBatch]

    def __init__(
        self,
        config: VisionRunConfig,
        images: ImageSplits,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self.images = images
        rows = rank_rows(
            config.batch,
            rank=ranks.data_rank,
            world_size=ranks.data_size,
            unit="images",
            split=config.split,
        )
        self.batches = training_images(
            images.train,
            config.data,
            config.augment,
            batch=config.batch,
            device=device,
            seed=config.seed,
            rows=rows,
        )
        mean, std = config.data.normalization
        self.augment = Augment(
            config.augment, num_classes=config.model.num_classes, mean=mean, std=std
        )
        super().__init__(
            config,
            device,
            build_model(config.model),
            self.batches,
            schedule=image_schedule(config, self.batches.batches_per_pass),
            decays=decays,
            ranks=ranks,
        )
        if config.ema is not None:
            self.average = WeightAverage(self.model, config.ema)

    @property
    def per_step(self) -> int:
        """The number of images in an update."""
        return self.config.batch

    def load_batch(self, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Return normalised, augmented images and (B, K) targets."""
        images, labels_B = (to_device(part, self.device) for part in (batch.images, batch.labels))
        return self.augment(images, labels_B, seed=batch.seed, share=self.batches.share)

    def forward(self, part: int, inputs: Tensor, targets: Tensor, *, record: bool) -> VisionOutput:
        """Run the model on a micro-batch of images and its (B, K) targets."""
        # Recording adds hooks to modules, and the blocks would be compiled once more for them.
        with eager(self.config.compile and record), autocast(self.config.precision, self.device):
            out = self.replica(inputs, targets, return_routings=record)
        return cast(VisionOutput, out)

    @torch.no_grad()
    def replay(self, batch: ImageBatch) -> None:
        """Run the model on a batch again, augmented as it was."""
        self.forward(0, *self.load_batch(batch), record=False)

    def validate(self) -> ImageValidation:
        """Score the validation images as an evaluation would, also with the averaged weights.

        No image changes another's score if statistics are running and `eval_capacity` is None.
        """
        report = self._evaluate()
        figure = report.figures[0]
        averaged: ImageFigure | None = None
        if self.average is not None:
            with self.average.applied():
                averaged = self._evaluate().figures[0]
        return ImageValidation(
            loss=figure.loss,
            top1=figure.top1,
            top5=figure.top5,
            images=report.images,
            statistics=figure.statistics,
            batch=report.batch,
            capacity=report.capacity,
            ema_loss=None if averaged is None else averaged.loss,
            ema_top1=None if averaged is None else averaged.top1,
            ema_top5=None if averaged is None else averaged.top5,
        )

    def _evaluate(self) -> ImageReport:
        config = ImageEvaluateConfig(
            split="valid",
            capacity=self.config.eval_capacity,
            batch=self.config.eval_batch,
            limit=self.config.eval_images,
            precision=self.config.precision,
        )
        # A last batch of another size is not worth compiling for.
        with eager(self.config.compile), measuring_alone(self.model):
            return evaluate_images(
                self.model,
                self.images.valid,
                self.config.data,
                config,
                device=str(self.device),
                ranks=self.ranks,
            )

    def close(self) -> None:
        """Stop the threads that read images ahead, and release captured CUDA graphs."""
        self.batches.close()
        super().close()

    def metrics_log(self, folder: Path) -> MetricsLog:
        """Make a log of top-1 accuracy."""
        return ImageMetricsLog(folder, "validation top-1 (%)")

    def data_checksum(self) -> dict[str, str]:
        """Return the checksums of the training labels and of the names of the classes."""
        return {
            "labels_sha256": labels_sha256(self.images.train),
            "classes_sha256": classes_sha256(self.images.classes),
        }

    def check_data(self, state: Mapping[str, Any]) -> None:
        """Raise a UserError where the checkpoint was trained on other labels or classes."""
        for key, now in self.data_checksum().items():
            check(
                state.get(key, now) == now,  # version 0.1 has no checksum of the classes
                f"{self.images.train.title} are not the images this run was begun with (other "
                f"{key.split('_')[0]}); restore those, or choose another run folder",
            )


def image_schedule(config: VisionRunConfig, batches_per_pass: int) -> ImageSchedule:
    """Convert the run's learning-rate schedule to updates."""
    return ImageSchedule(
        lr=config.lr,
        min_lr=config.min_lr,
        schedule=config.schedule,
        steps=config.updates(batches_per_pass),
        warmup=config.warmup_updates(batches_per_pass),
    )


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return True for matrices except biases (experts have one row each) and positions."""
    parts = name.split(".")
    return (
        parameter.dim() >= 2
        and not parts[-1].endswith("bias")
        and not {"position", "positions"} & set(parts)
    )


def check_images(config: VisionRunConfig, images: ImageSplits) -> None:
    """Check that the images have the classes and the number that the run's config expects."""
    classes = len(images.classes)
    check(
        classes == config.model.num_classes,
        f"{images.train.title} has {classes} classes, not model.num_classes="
        f"{config.model.num_classes}; set it to {classes}",
    )
    check(
        (config.eval_images or 1) <= len(images.valid),
        f"eval_images={config.eval_images} exceeds the {len(images.valid):,} validation images; "
        "lower it",
    )


def probe_validation(config: VisionRunConfig, images: ImageSplits) -> None:
    """Raise a UserError for a validation image that cannot be read, before any step is trained."""
    scored = EvaluationImages(
        images.valid, config.data, batch=config.eval_batch, limit=config.eval_images
    )
    probe_images(images.valid, scored.indices, threads=config.data.threads)
