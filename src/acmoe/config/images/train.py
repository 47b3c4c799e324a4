"""Config of a training run of an image classifier."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

from acmoe.config.images.data import AugmentConfig, Capacity, ImageDataConfig, checked_capacity
from acmoe.config.images.presets import vision_router
from acmoe.config.images.vision import SoftViTConfig, SwinConfig, VisionConfig
from acmoe.config.overrides import override
from acmoe.config.parallel import ParallelConfig, check_parallel, refuse_pipeline
from acmoe.config.updates import Precision, check_count, check_updates
from acmoe.errors import check, check_positive


@dataclass(frozen=True, kw_only=True)
class VisionRunConfig:
    """One training run. On the CPU of one machine, equal configs give bitwise equal weights.

    The length of the run is given in `steps` or in `epochs`, and the warmup in the same unit.
    """

    kind: ClassVar[str]  # identifies the run's config class in config.json

    model: VisionConfig  # the model
    data: ImageDataConfig = field(default_factory=ImageDataConfig)  # the images
    augment: AugmentConfig = field(default_factory=AugmentConfig)  # changes of training images
    steps: int | None = None  # optimizer updates
    epochs: float | None = None  # passes over the training images
    batch: int  # images per optimizer update
    split: int = 1  # micro-batches per update; each has its own batch statistics
    lr: float  # peak learning rate of AdamW
    warmup: float = 0.0  # steps or epochs over which lr rises from 0
    schedule: Literal["constant", "cosine"] = "cosine"  # after the warmup
    min_lr: float = 0.0  # final lr of the cosine schedule
    betas: tuple[float, float] = (0.9, 0.999)  # decay rates of AdamW's two moments
    eps: float = 1e-8  # term in AdamW's denominator
    weight_decay: float = 0.05  # decoupled; not on biases, gains, positions or scalars
    clip: float | None = None  # greatest gradient norm; None: no clipping
    # Decay per update of a moving average of the weights, which is validated and saved beside them
    # (`acmoe evaluate RUN --ema`). DeiT's is 0.99996, made for 100,000 updates and more: after n
    # updates, a share 0.99996^n of it is still the initial weights. None: no average.
    ema: float | None = None
    precision: Precision = "fp32"  # bf16: autocast; weights and optimizer stay float32
    seed: int = 0  # draws first weights, image order, augmentation and dropout
    log_every: int = 10  # steps between lines of metrics.jsonl
    eval_every: int = 1000  # steps between validations
    eval_batch: int = 64  # images per forward pass in validation
    eval_images: int | None = None  # number of images to validate on; None: all
    eval_capacity: Capacity = None  # capacity factor in validation; None: no token is dropped
    checkpoint_every: int = 1000  # steps between checkpoints
    keep: int = 2  # number of latest checkpoints kept, beside the best one
    compile: bool = False  # torch.compile each block
    graph: bool = False  # replay updates as CUDA graphs, faster where launches dominate
    device: str = "auto"  # auto: the first of cuda, xpu, mps and cpu that torch finds
    # Processes that train together, started by torchrun.
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        check_updates(self, rows="images")
        refuse_pipeline(self.parallel)
        check_parallel(self, rows="images")
        if self.eval_images is not None:
            check_count(self.eval_images, "eval_images")
        check(
            self.ema is None or 0 <= self.ema < 1,
            f"ema={self.ema}; a decay lies in [0, 1), such as 0.99996; none: no average",
        )
        checked_capacity(self.eval_capacity)
        self._check_length()
        self._check_images()

    def _check_length(self) -> None:
        check(
            (self.steps is None) != (self.epochs is None),
            f"steps={self.steps} and epochs={self.epochs}; give one of them, the other as none",
        )
        if self.steps is not None:
            check_count(self.steps, "steps")
        if self.epochs is not None:
            check_positive(self.epochs, "epochs")

    def _check_images(self) -> None:
        check(
            self.data.size == self.model.image_size,
            f"data.size={self.data.size} differs from model.image_size={self.model.image_size}; "
            "set both to the same number of pixels",
        )
        check(
            self.model.channels == 3,
            f"model.channels={self.model.channels}; images are read in 3 colours",
        )

    def updates(self, batches_per_pass: int) -> int:
        """Return the length of the run in optimizer updates."""
        return self._in_updates(self.steps or 0, self.epochs, batches_per_pass, least=1)

    def warmup_updates(self, batches_per_pass: int) -> int:
        """Return the length of the warmup in optimizer updates."""
        epochs = None if self.epochs is None else self.warmup
        return self._in_updates(round(self.warmup), epochs, batches_per_pass, least=0)

    def _in_updates(self, steps: int, epochs: float | None, per_pass: int, *, least: int) -> int:
        return steps if epochs is None else max(least, round(epochs * per_pass))


@dataclass(frozen=True, kw_only=True)
class SwinRunConfig(VisionRunConfig):
    """A training run of a Swin-MoE."""

    kind: ClassVar[str] = "swin-run"

    model: SwinConfig  # the model


@dataclass(frozen=True, kw_only=True)
class SoftViTRunConfig(VisionRunConfig):
    """A training run of a vision transformer with SoftMoE layers."""

    kind: ClassVar[str] = "softmoe-run"

    model: SoftViTConfig  # the model


VISION_RUNS: dict[str, type[VisionRunConfig]] = {
    config.kind: config for config in (SwinRunConfig, SoftViTRunConfig)
}

R = TypeVar("R", bound=VisionRunConfig)


def override_vision_run(config: R, pairs: Sequence[str]) -> R:
    """Return the run with `key=value` overrides applied; see `acmoe.config.overrides`.

    The name of a router, or of a router's base, is converted to a config by `vision_router`, as in
    `create_model`. Overriding `steps` resets `epochs`, and the other way round.
    """
    keys = {pair.partition("=")[0] for pair in pairs}
    added = []
    for own, other in (("steps", "epochs"), ("epochs", "steps")):
        if own in keys and other not in keys and getattr(config, own) is None:
            added.append(f"{other}=none")
            check(
                config.warmup == 0 or "warmup" in keys,
                f"the run counted its warmup={config.warmup:g} in {other}; with {own}, give warmup "
                f"in {own} too",
            )
    changed = override(
        config,
        (*pairs, *added),
        named=lambda owner, name, value: vision_router(value, config.model),
    )
    check(
        changed.steps is None or changed.warmup == int(changed.warmup),
        f"warmup={changed.warmup:g} is a number of updates, as steps={changed.steps} is; make it "
        "whole, or give epochs in place of steps",
    )
    return changed
