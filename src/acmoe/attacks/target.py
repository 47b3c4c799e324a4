"""A classifier as an attacker meets it.

B images in C colours, H rows, W columns; K classes.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from acmoe.attacks.ball import Bounds
from acmoe.config.images.attack import AttackConfig
from acmoe.config.images.data import RGB, ImageDataConfig
from acmoe.errors import UserError, check
from acmoe.routing.statistics import override_statistics


class Target:
    """Images of a space -> logits: no balance loss, no noise, float32.

    space       pixel: images in [0, 1], normalised on the way in; normalized: as the classifier
                reads
    clamp       attacks stay within the range of images
    precision   of the gradients an attack follows; bf16 is autocast
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mean: RGB,
        std: RGB,
        space: str = "pixel",
        clamp: bool = True,
        precision: str = "fp32",
    ) -> None:
        self.model, self.space, self.clamp, self.precision = model, space, clamp, precision
        self.mean, self.std = (torch.tensor(value).view(1, 3, 1, 1) for value in (mean, std))

    @classmethod
    def of(cls, model: nn.Module, data: ImageDataConfig, config: AttackConfig) -> "Target":
        """The classifier as this attack sees it, on images normalised as these data are."""
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
        """Bytes as images of the space."""
        check(images.dtype == torch.uint8, f"images are {images.dtype}; give bytes (uint8)")
        pixels = images.float() / 255
        return pixels if self.space == "pixel" else self._normalize(pixels)

    def bounds(self, x: Tensor) -> Bounds | None:
        """The least and the greatest value a colour can have in the space."""
        if not self.clamp:
            return None
        black, white = x.new_zeros(1, 3, 1, 1), x.new_ones(1, 3, 1, 1)
        if self.space == "pixel":
            return black, white
        return self._normalize(black), self._normalize(white)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, K) logits, all finite."""
        with torch.autocast(x.device.type, enabled=False):
            return logits_of(self._answer(x))

    def on_the_way(self, x: Tensor, *, precision: str = "fp32") -> Tensor:
        """(B, K) logits for an attack's next step: not looked at, since the host would wait."""
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            return _logits(self._answer(x))

    def _answer(self, x: Tensor) -> object:
        return self.model(self._normalize(x) if self.space == "pixel" else x)

    def _normalize(self, pixels: Tensor) -> Tensor:
        # Kept where the images are: the host waits for a copy from its own memory.
        self.mean, self.std = (value.to(pixels.device) for value in (self.mean, self.std))
        return (pixels - self.mean) / self.std


def logits_of(output: object) -> Tensor:
    """The logits of a model's answer, all finite: a tensor, or something that has them."""
    logits = _logits(output)
    check(
        bool(torch.isfinite(logits).all()),
        "the model's logits are not all finite; nothing can be scored with it",
    )
    return logits


def _logits(output: object) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise UserError(
            f"the model answers with {type(output).__name__} and no logits; only classifiers can "
            "be attacked"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@contextlib.contextmanager
def white_box(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and gradients through the scale of adaptive routers, inside `with`.

    Without the latter an attack would be blind to how moving a token changes its cluster's scale,
    and so weaker on adaptive models than on the plain ones they are compared with.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with override_statistics(model, detach=False):
            yield
    finally:
        for module, training in modes:
            module.training = training


def margin(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """(B,) logit of the label less the greatest other one: negative where the label has lost."""
    of_label_B1 = functional.one_hot(labels_B, logits_BK.shape[-1]).bool()
    others_BK = logits_BK.masked_fill(of_label_B1, -torch.inf)
    return logits_BK.gather(1, labels_B[:, None])[:, 0] - others_BK.amax(-1)


def loss_gradient(target: Target, x: Tensor, labels_B: Tensor) -> Tensor:
    """Gradient of each image's cross-entropy, summed where a batch couples its images."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        logits_BK = target.on_the_way(x, precision=target.precision)
        loss = functional.cross_entropy(logits_BK, labels_B, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, x)
    return gradient


class Soundness:
    """Whether all gradients of an attack were finite; asked once, since the host waits for it."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def note(self, gradient: Tensor) -> Tensor:
        """The gradient, for whoever uses it."""
        self.seen.append(gradient.isfinite().all())
        return gradient

    def check(self) -> None:
        check(
            bool(torch.stack(self.seen).all()),
            "the gradient with respect to an image is not finite; the model cannot be attacked",
        )
