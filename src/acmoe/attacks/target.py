"""The classifier under attack, and the gradients and losses that attacks use.

B images with C channels, H rows, W columns; K classes.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from acmoe.attacks.ball import Bounds
from acmoe.config.images.attack import AttackConfig
from acmoe.config.images.data import RGB, ImageDataConfig
from acmoe.config.updates import Precision
from acmoe.errors import NonFiniteError, UserError, check
from acmoe.routing.statistics.override import adaptive_configs, override_statistics
from acmoe.runtime import autocast, evaluating


class Target:
    """Maps images of an attack's input space to float32 logits.

    space       pixel: images in [0, 1], which are normalised before the model; normalized: images
                as the model reads them
    clamp       attacked images stay within the range of valid images
    precision   of the gradients that an attack follows; bf16 uses autocast
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mean: RGB,
        std: RGB,
        space: str = "pixel",
        clamp: bool = True,
        precision: Precision = "fp32",
    ) -> None:
        self.model, self.space, self.clamp, self.precision = model, space, clamp, precision
        self.mean, self.std = (torch.tensor(value).view(1, 3, 1, 1) for value in (mean, std))

    @classmethod
    def of(cls, model: nn.Module, data: ImageDataConfig, config: AttackConfig) -> "Target":
        """Build the target of an attack config, for images that are normalised as `data` says."""
        mean, std = data.normalization
        return cls(
            model,
            mean=mean,
            std=std,
            space=config.space,
            clamp=config.clamp,
            precision=config.precision,
        )

    def enter(self, images: Tensor) -> Tensor:
        """Convert uint8 images to the input space of the attack."""
        check(images.dtype == torch.uint8, f"images are {images.dtype}; give bytes (uint8)")
        pixels = images.float() / 255
        return pixels if self.space == "pixel" else self._normalize(pixels)

    def bounds(self, x: Tensor) -> Bounds | None:
        """Return the least and greatest valid value of each channel; None without `clamp`."""
        if not self.clamp:
            return None
        black, white = x.new_zeros(1, 3, 1, 1), x.new_ones(1, 3, 1, 1)
        if self.space == "pixel":
            return black, white
        return self._normalize(black), self._normalize(white)

    def __call__(self, x: Tensor) -> Tensor:
        """Return (B, K) float32 logits, checked to be finite."""
        with torch.autocast(x.device.type, enabled=False):
            return logits_of(self._forward(x))

    def unchecked_logits(self, x: Tensor, *, precision: Precision = "fp32") -> Tensor:
        """Return (B, K) logits for a step of an attack.

        They are not checked to be finite, since that would make the host wait for the device.
        """
        with autocast(precision, x.device):
            return unchecked_logits(self._forward(x))

    def _forward(self, x: Tensor) -> object:
        return self.model(self._normalize(x) if self.space == "pixel" else x)

    def _normalize(self, pixels: Tensor) -> Tensor:
        # Keep both on the device of the images: each copy from host memory makes the host wait.
        self.mean, self.std = (value.to(pixels.device) for value in (self.mean, self.std))
        return (pixels - self.mean) / self.std


def logits_of(output: object) -> Tensor:
    """Return the logits of a model's output, checked to be finite.

    The output is a tensor of logits, or an object with an attribute `logits`.
    """
    logits = unchecked_logits(output)
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError(
            "the model's logits are not all finite; attack another checkpoint, or train again with "
            "a lower lr or clip=1.0"
        )
    return logits


def unchecked_logits(output: object) -> Tensor:
    """Return the logits of a model's output, in float32 or wider.

    They are not checked to be finite, since that would make the host wait for the device.
    """
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise UserError(
            f"the model answers with {type(output).__name__} and no logits; only classifiers can "
            "be attacked"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@contextlib.contextmanager
def white_box(model: nn.Module) -> Iterator[None]:
    """Use evaluation mode, and let gradients flow through the scale of adaptive routers.

    Without these gradients an attack could not see how moving a token changes the scale of its
    cluster. It would be weaker on adaptive models than on the plain models they are compared with.
    """
    adaptive = bool(adaptive_configs(model))
    through = override_statistics(model, detach=False) if adaptive else contextlib.nullcontext()
    with evaluating(model), through:
        yield


def margin(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return (B,) the label's logit minus the greatest other logit; negative if misclassified."""
    of_label_B1 = functional.one_hot(labels_B, logits_BK.shape[-1]).bool()
    others_BK = logits_BK.masked_fill(of_label_B1, -torch.inf)
    return logits_BK.gather(1, labels_B[:, None])[:, 0] - others_BK.amax(-1)


def loss_gradient(target: Target, x: Tensor, labels_B: Tensor) -> Tensor:
    """Return the gradient of the summed cross-entropy of the batch with respect to x."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        logits_BK = target.unchecked_logits(x, precision=target.precision)
        loss = functional.cross_entropy(logits_BK, labels_B, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, x)
    return gradient


class FiniteGradients:
    """Checks that all gradients of an attack are finite.

    The check is made once, at the end of the attack, since it makes the host wait for the device.
    """

    def __init__(self) -> None:
        self.flags: list[Tensor] = []

    def record(self, gradient: Tensor) -> Tensor:
        """Record whether the gradient is finite, and return it unchanged."""
        self.flags.append(gradient.isfinite().all())
        return gradient

    def check(self) -> None:
        """Raise if a recorded gradient was not finite."""
        if not bool(torch.stack(self.flags).all()):
            raise NonFiniteError(
                "the gradient with respect to an image is not finite; the model cannot be "
                "attacked: choose another checkpoint, or --precision fp32"
            )
