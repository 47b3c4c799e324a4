"""Configs of image data: where images come from, their augmentation, and their evaluation."""

import warnings
from dataclasses import InitVar, dataclass
from typing import Literal, get_args

from acmoe.config.routing import Statistics
from acmoe.config.updates import Precision
from acmoe.errors import (
    UserError,
    check,
    check_choice,
    check_distinct,
    check_not_negative,
    check_positive,
    is_finite,
)

Order = Literal["shuffled", "stored"]
# Capacity factor of the experts while images are scored or attacked. None: no token is dropped, so
# that no image takes an expert's place from another. A number: that factor; the paper's Swin has
# 1.25. "model": the factor that the model was trained with.
Capacity = float | Literal["model"] | None
RGB = tuple[float, float, float]

IMAGENET_MEAN: RGB = (0.485, 0.456, 0.406)
IMAGENET_STD: RGB = (0.229, 0.224, 0.225)
# Over all pixels of the 1,797 scans, with white as 1.
DIGITS_MEAN: RGB = (0.305, 0.305, 0.305)
DIGITS_STD: RGB = (0.376, 0.376, 0.376)

DIGITS_SIDE = 8  # pixels


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig:
    """The data set of a run. Images are RGB squares of `size` x `size` pixels."""

    # digits: the scans that come with scikit-learn; folder: SPLIT/CLASS/file, as in ImageNet;
    # arrays: SPLIT.npz; hub: a data set of the HuggingFace hub.
    name: Literal["digits", "folder", "arrays", "hub"] = "digits"
    source: str | None = None  # the folder, or the id on the hub; digits need none
    size: int = 32  # for digits a multiple of 8, as their pixels are repeated
    # Shorter side, in pixels, to which evaluation resizes an image before the centre crop. None:
    # size for digits, else size * 8 / 7, which is 256 for 224.
    resize: int | None = None
    # Fraction of the training images held out as `valid`; the source's own validation images then
    # become `test`. With 0 they serve as both. Digits are always split 70 : 15 : 15.
    holdout: float = 0.0
    seed: int = 0  # draws the split
    mean: RGB | None = None  # per channel, in [0, 1]; None: ImageNet's, or the digits' own
    std: RGB | None = None  # per channel, as `mean`
    threads: int = 4  # threads that read and decode images
    # Keep all training images on the device, as uint8 squares of `resize` pixels, and gather and
    # crop batches there. No step then waits for the host, which may have few cores.
    on_device: bool = False

    def __post_init__(self) -> None:
        check_choice(self.name, ("digits", "folder", "arrays", "hub"), "data.name")
        check(
            (self.source is None) == (self.name == "digits"),
            f"data.source={self.source!r} with data.name={self.name}: digits come with "
            "scikit-learn and take none, the others need a folder or a hub id",
        )
        check(self.size >= 1, f"data.size={self.size}; it must be at least 1 pixel")
        check(
            self.name != "digits" or self.size % DIGITS_SIDE == 0,
            f"data.size={self.size} is no multiple of the digits' {DIGITS_SIDE} pixels; use "
            f"{max(1, round(self.size / DIGITS_SIDE)) * DIGITS_SIDE}",
        )
        check(
            self.shorter_side >= self.size,
            f"data.resize={self.resize} leaves less than data.size={self.size} pixels; raise it",
        )
        check(
            self.name != "digits" or self.shorter_side == self.size,
            f"data.resize={self.resize}: digits are not cropped; leave it out",
        )
        check(0 <= self.holdout < 1, f"data.holdout={self.holdout}; it must lie in [0, 1)")
        check(
            self.holdout == 0 or self.name != "digits",
            f"data.holdout={self.holdout}: digits have a fixed split; leave it out",
        )
        check(
            not self.on_device or self.shorter_side <= 2 * self.size,
            f"data.resize={self.resize} is over twice data.size={self.size}: crops on the device "
            "are not smoothed, and would leave pixels out; lower it, or use data.on_device=false",
        )
        check_not_negative(self.seed, "data.seed")
        check(self.threads >= 1, f"data.threads={self.threads}; it must be at least 1")
        for mean in self.mean or ():
            check(is_finite(mean), f"data.mean={self.mean}; each must be finite")
        for std in self.std or ():
            check(
                is_finite(std) and std > 0, f"data.std={self.std}; each must be positive and finite"
            )

    @property
    def shorter_side(self) -> int:
        """`resize`, with None replaced by its default."""
        if self.resize is not None:
            return self.resize
        return self.size if self.name == "digits" else round(self.size * 8 / 7)

    @property
    def normalization(self) -> tuple[RGB, RGB]:
        """Mean and standard deviation per channel, with None replaced by the defaults."""
        digits = self.name == "digits"
        mean = DIGITS_MEAN if digits else IMAGENET_MEAN
        std = DIGITS_STD if digits else IMAGENET_STD
        return self.mean or mean, self.std or std


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation of training images and labels. Everything is off by default.

    The preset `swin` is Swin-MoE's recipe with two omissions: a colour jitter of 0.4, which
    Swin-MoE's loader skips whenever RandAugment is on, and a label smoothing of 0.1, which models
    of this library apply in their loss (`model.label_smoothing`).
    """

    crop: tuple[float, float] | None = None  # area range of a random crop; None: centre crop
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # range of width / height of the crop
    flip: float = 0.0  # probability of a horizontal flip
    shift: int = 0  # greatest translation along each axis, in pixels; filled with black
    randaugment: float | None = None  # magnitude, 0 to 10
    randaugment_std: float = 0.5  # standard deviation of the magnitude, drawn per image
    randaugment_ops: int = 2  # operations drawn per image, each applied with probability 1/2
    color_jitter: float = 0.0  # brightness, contrast and saturation are scaled by 1 +- this
    erase: float = 0.0  # probability of random erasing: a rectangle becomes noise
    mixup: float = 0.0  # alpha of Beta(alpha, alpha); 0: off
    cutmix: float = 0.0  # alpha of Beta(alpha, alpha); 0: off
    switch: float = 0.5  # probability of cutmix over mixup where both are on
    label_smoothing: float = 0.0  # share of the target that all classes divide
    # Repeated augmentation: a pass over N images draws N / repeats of them, each `repeats` times
    # and each time augmented anew (3 in DeiT).
    repeats: int = 1

    def __post_init__(self) -> None:
        check(
            self.repeats >= 1,
            f"augment.repeats={self.repeats}; it must be at least 1, which repeats nothing",
        )
        if self.crop is not None:
            least, most = self.crop
            check(0 < least <= most <= 1, f"augment.crop={self.crop}; need 0 < least <= most <= 1")
        low, high = self.ratio
        check(
            0 < low <= high and is_finite(high),
            f"augment.ratio={self.ratio}; need 0 < least <= most, both finite",
        )
        for name in ("flip", "erase", "switch"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"augment.{name}={value}; a probability lies in [0, 1]")
        for name in ("shift", "color_jitter", "mixup", "cutmix", "randaugment_std"):
            check_not_negative(getattr(self, name), f"augment.{name}")
        check(
            self.randaugment is None or 0 <= self.randaugment <= 10,
            f"augment.randaugment={self.randaugment}; a magnitude lies in [0, 10]",
        )
        check(
            self.randaugment_ops >= 1,
            f"augment.randaugment_ops={self.randaugment_ops}; it must be at least 1",
        )
        check(
            0 <= self.label_smoothing < 1,
            f"augment.label_smoothing={self.label_smoothing}; it must lie in [0, 1)",
        )

    @classmethod
    def preset(cls, name: str) -> "AugmentConfig":
        """Return a preset: none, light (small images such as digits), crop (short runs) or swin."""
        if name not in _PRESETS:
            raise UserError(
                f"augment preset {name!r} is unknown; choose one of {', '.join(_PRESETS)}"
            )
        return _PRESETS[name]


_PRESETS = {
    "none": AugmentConfig(),
    "light": AugmentConfig(shift=2, erase=0.25),
    "crop": AugmentConfig(crop=(0.35, 1.0), flip=0.5),
    "swin": AugmentConfig(
        crop=(0.08, 1.0),
        flip=0.5,
        randaugment=9.0,
        erase=0.25,
        mixup=0.8,
        cutmix=1.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class ImageEvaluateConfig:
    """An evaluation of a classifier. The report repeats every setting its figures depend on."""

    split: Literal["valid", "test"] = "test"  # the images that are scored
    # Statistics modes of adaptive routers, one figure for each; empty: the model's own mode.
    statistics: tuple[Statistics, ...] = ()
    capacity: Capacity = None  # capacity factor of the experts; None: no token is dropped
    dropless: InitVar[bool | None] = None  # old spelling of `capacity`
    batch: int = 64  # images per forward pass; affects batch statistics and capacities
    # shuffled: batches mix classes, as in training; stored: file order, often sorted by class.
    order: Order = "shuffled"
    seed: int = 0  # draws the image order, and the choices of random routers
    limit: int | None = None  # score only the first `limit` images of that order; None: all
    precision: Precision = "fp32"  # bf16: autocast; weights stay float32
    routing: bool = False  # also report load balance and instability of every MoE layer

    def __post_init__(self, dropless: bool | None) -> None:
        object.__setattr__(self, "capacity", checked_capacity(self.capacity, dropless))
        check_choice(self.split, ("valid", "test"), "split")
        for mode in self.statistics:
            check_choice(mode, get_args(Statistics), "statistics")
        check_distinct(self.statistics, "statistics")
        check_batches(self.batch, self.order, self.limit, self.seed)
        check_choice(self.precision, ("fp32", "bf16"), "precision")


def checked_capacity(capacity: Capacity, dropless: bool | None = None) -> Capacity:
    """Return a valid capacity; `dropless`, the option's old spelling, replaces it with a warning.

    dropless=False, which was the default, means the model's own factor.
    """
    if dropless is not None:
        capacity = None if dropless else "model"
        warnings.warn(
            f"dropless={dropless} is now capacity={capacity!r}; no token is dropped by default",
            FutureWarning,
            stacklevel=4,
        )
    if isinstance(capacity, str):
        check_choice(capacity, ("model",), "capacity")
    elif capacity is not None:
        check_positive(capacity, "capacity")
    return capacity


def parse_capacity(text: str) -> Capacity:
    """Parse a capacity as the command line gives it: `none`, `model` or a factor such as 1.25."""
    if text in ("none", "model"):
        return None if text == "none" else "model"
    try:
        return checked_capacity(float(text))
    except ValueError as error:
        raise UserError(
            f"capacity={text!r}; give none, model, or a factor such as the paper's 1.25"
        ) from error


def check_batches(batch: int, order: str, limit: int | None, seed: int) -> None:
    """Check the settings that evaluations and attacks of images share."""
    check(batch >= 1, f"batch={batch}; it must be at least 1")
    check_choice(order, ("shuffled", "stored"), "order")
    check(limit is None or limit >= 1, f"limit={limit}; it must be at least 1, or none")
    check_not_negative(seed, "seed")
