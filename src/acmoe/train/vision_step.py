"""One optimizer update of an image classifier, and everything it changes.

B images, K classes, E experts.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from acmoe.config.images.data import ImageEvaluateConfig
from acmoe.config.images.train import VisionRunConfig
from acmoe.data.images.augment import Augment
from acmoe.data.images.batches import ImageBatch
from acmoe.data.images.on_device import training_images
from acmoe.data.images.splits import ImageSplits
from acmoe.data.transfer import to_device
from acmoe.errors import check
from acmoe.evaluate.vision import evaluate_images
from acmoe.models.compiled import compile_blocks
from acmoe.models.images.classifier import ImageClassifier, VisionOutput
from acmoe.models.registry import build_model
from acmoe.runtime import autocast
from acmoe.train.graph import StepGraph, make_capturable
from acmoe.train.optim import adam, learning_rate, set_learning_rate
from acmoe.train.step import eager, mean, summed_loads, take_step
from acmoe.train.update import Update


class ImageValidation(NamedTuple):
    """A score of the validation images, with what it depends on."""

    loss: float  # mean nats per image
    top1: float  # percent
    top5: float | None  # percent; None where there are no more than five classes
    images: int
    statistics: str
    batch: int


class Pace(NamedTuple):
    """The learning rate's course, counted in updates."""

    lr: float
    min_lr: float
    schedule: str
    steps: int
    warmup: int


class VisionTrainer:
    """The model, its optimizer and the place in the images.

    `recent` are the batches since somebody last looked whether the losses are finite.
    """

    def __init__(self, config: VisionRunConfig, images: ImageSplits, device: torch.device) -> None:
        self.config, self.images, self.device = config, images, device
        self.batches = training_images(
            images.train,
            config.data,
            config.augment,
            batch=config.batch,
            device=device,
            seed=config.seed,
        )
        per_pass = self.batches.batches_per_pass
        self.pace = Pace(
            lr=config.lr,
            min_lr=config.min_lr,
            schedule=config.schedule,
            steps=config.updates(per_pass),
            warmup=config.warmup_updates(per_pass),
        )
        mean, std = config.data.normalization
        self.augment = Augment(
            config.augment, num_classes=config.model.num_classes, mean=mean, std=std
        )
        self.model = cast(ImageClassifier, build_model(config.model)).to(device).train()
        self.optimizer = adam(
            self.model,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            decays=decays,
        )
        self.inputs: tuple[Tensor, Tensor] | None = None  # images and targets of the update
        self.recent: list[ImageBatch] = []
        self.graph: StepGraph | None = None
        if config.graph:
            make_capturable(self.optimizer, device)
            self.graph = StepGraph(self._step)
        if config.compile:
            compile_blocks(self.model)

    @property
    def per_step(self) -> int:
        """Images of an update."""
        return self.config.batch

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.pace, step)

    def update(self, step: int, *, record: bool) -> Update:
        """Read a batch, take a step. Nothing here waits for the device."""
        batch = next(self.batches)
        self.recent.append(batch)
        set_learning_rate(self.optimizer, self.learning_rate(step))
        images, targets_BK = self._altered(batch)
        if self.graph is None:
            self.inputs = images, targets_BK
            return self._step(record)
        hold = self.graph.hold
        self.inputs = hold("images", images), hold("targets", targets_BK)
        return self.graph(record)

    def _step(self, record: bool) -> Update:
        """An update by `inputs`. Inside a graph it may only touch the device."""
        assert self.inputs is not None
        outputs = []
        parts = zip(*(part.chunk(self.config.split) for part in self.inputs), strict=True)
        for images, targets_BK in parts:
            out = self._forward(images, targets_BK, record=record)
            assert out.loss is not None
            ((out.loss + out.aux_loss) / self.config.split).backward()  # type: ignore[no-untyped-call]
            outputs.append(out)
        loss, aux_loss = mean([out.loss for out in outputs]), mean([o.aux_loss for o in outputs])
        sound = take_step(
            self.model,
            self.optimizer,
            clip=self.config.clip,
            sound=(loss + aux_loss).isfinite(),
        )
        routings = [out.routings or () for out in outputs]
        return Update(loss, aux_loss, sound, summed_loads(routings, self.config.model.num_experts))

    @torch.no_grad()
    def replay(self, batch: ImageBatch) -> None:
        """Read a batch again."""
        self._forward(*self._altered(batch), record=False)

    def validate(self) -> ImageValidation:
        """Score the validation images as an evaluation would; training goes on as if nothing was.

        With running statistics no image changes another's score.
        """
        valid = self.images.valid
        config = ImageEvaluateConfig(
            split="valid",
            batch=self.config.eval_batch,
            limit=self.config.eval_images,
            precision=self.config.precision,
        )
        # A last batch of another size is not worth compiling for.
        with eager(self.config.compile):
            report = evaluate_images(
                self.model, valid, self.config.data, config, device=str(self.device)
            )
        figure = report.figures[0]
        return ImageValidation(
            loss=figure.loss,
            top1=figure.top1,
            top5=figure.top5,
            images=report.images,
            statistics=figure.statistics,
            batch=report.batch,
        )

    def close(self) -> None:
        """Stop reading images ahead, and let go of the memory of captured updates."""
        self.batches.close()
        self.graph, self.inputs = None, None

    def _altered(self, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Normalised images and (B, K) targets, on the device."""
        images, labels_B = (to_device(part, self.device) for part in (batch.images, batch.labels))
        return self.augment(images, labels_B, seed=batch.seed)

    def _forward(self, images: Tensor, targets_BK: Tensor, *, record: bool) -> VisionOutput:
        # Recording hangs hooks on modules: blocks would be compiled once more for them.
        with eager(self.config.compile and record), autocast(self.config.precision, self.device):
            out = self.model(images, targets_BK, return_routings=record)
        return cast(VisionOutput, out)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Matrices that are neither biases (of experts: one row each) nor positions."""
    parts = name.split(".")
    return (
        parameter.dim() >= 2
        and not parts[-1].endswith("bias")
        and not {"position", "positions"} & set(parts)
    )


def check_images(config: VisionRunConfig, images: ImageSplits) -> None:
    """The images are those the run's model and settings are made for."""
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
