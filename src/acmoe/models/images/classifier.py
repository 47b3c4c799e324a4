"""Base class of the image classifiers: images in, logits and losses out.

Shapes: B batch, D features, K classes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from acmoe.config.images.vision import VisionConfig
from acmoe.errors import check
from acmoe.experts.moe import MoE
from acmoe.experts.soft import SoftMoE
from acmoe.models.images.layers import init_linear
from acmoe.models.recorded import recorded
from acmoe.ops.checks import check_range
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.state import Routing


class VisionOutput(NamedTuple):
    """Result of a forward pass. `loss` is the cross-entropy alone; train on loss + aux_loss."""

    logits: Tensor  # (B, K)
    loss: Tensor | None  # () mean nats per image, label smoothing included in training
    aux_loss: Tensor  # () weighted auxiliary losses of all MoE layers
    routings: tuple[Routing, ...] | None  # one per MoE layer, if requested


class ImageClassifier(nn.Module):
    """A backbone and a linear head. Routing state is passed as a value, not stored in the module.

    A subclass builds `head` and defines `features`, `check_size` and `moe_layers`. With
    `checkpoint_blocks=True` the activations inside its blocks are recomputed in backward.
    """

    head: nn.Linear

    def __init__(self, config: VisionConfig, *, checkpoint_blocks: bool) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = checkpoint_blocks

    def forward(
        self, images: Tensor, targets: Tensor | None = None, *, return_routings: bool = False
    ) -> VisionOutput:
        """Return the logits of every class and, with targets, their mean cross-entropy.

        Args:
            images: (B, channels, height, width) normalised pixels.
            targets: (B,) class ids, or (B, K) probabilities.
            return_routings: also return each MoE layer's routing.
        """
        _check_images(images, self.config.channels)
        self.check_size(*images.shape[-2:])
        if targets is not None:
            _check_targets(targets, len(images), self.config.num_classes)
        with recorded(self.moe_layers() if return_routings else []) as routings:
            features_BD, aux_loss = self.features(images)
        logits_BK = self.head(features_BD)
        loss = None
        if targets is not None:
            smoothing = self.config.label_smoothing if self.training else 0.0
            loss = _cross_entropy(logits_BK, targets, smoothing)
        found = tuple(routings) if return_routings else None
        return VisionOutput(logits_BK, loss, aux_loss, found)

    def new_head(self, num_classes: int) -> None:
        """Replace the head by a freshly initialised one with `num_classes` classes."""
        self.config = replace(self.config, num_classes=num_classes)
        weight = self.head.weight
        self.head = nn.Linear(weight.shape[1], num_classes, dtype=weight.dtype).to(weight.device)
        init_linear(self.head, self.config.init_std)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (B, D) input of the head, and the auxiliary losses."""
        raise NotImplementedError(f"{type(self).__name__} must define features")

    def check_size(self, height: int, width: int) -> None:
        """Raise a UserError for an image size that the backbone cannot process."""
        raise NotImplementedError(f"{type(self).__name__} must define check_size")

    def moe_layers(self) -> Sequence[MoE | SoftMoE]:
        """Return the MoE layers, first to last."""
        raise NotImplementedError(f"{type(self).__name__} must define moe_layers")


def _check_images(images: Tensor, channels: int) -> None:
    """Require floating-point images of (B, channels, height, width)."""
    check(
        images.dim() == 4 and images.shape[1] == channels and images.numel() > 0,
        f"images have shape {tuple(images.shape)}; pass (batch, {channels}, height, width), each 1 "
        "or more",
    )
    check(
        images.is_floating_point(),
        f"images have dtype {images.dtype}; pass normalised floating-point pixels",
    )


def _check_targets(targets: Tensor, num_images: int, num_classes: int) -> None:
    """Require one class per image, or (mixed images) one probability per image and class."""
    if targets.is_floating_point():
        fits = tuple(targets.shape) == (num_images, num_classes)
    else:
        fits = tuple(targets.shape) == (num_images,)
    check(
        fits,
        f"targets have shape {tuple(targets.shape)} and dtype {targets.dtype}; pass {num_images} "
        f"class ids, or probabilities of shape ({num_images}, {num_classes})",
    )
    if not targets.is_floating_point():
        check_range(targets, 0, num_classes, "targets")


def _cross_entropy(logits_BK: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return the mean cross-entropy, in float32 even for 16-bit logits."""
    logits_BK = logits_BK.to(accumulation_dtype(logits_BK.dtype))
    targets = targets.to(logits_BK.dtype) if targets.is_floating_point() else targets.long()
    return nn.functional.cross_entropy(logits_BK, targets, label_smoothing=smoothing)
