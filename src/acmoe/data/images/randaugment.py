"""RandAugment on a whole batch, in the variant where greater magnitudes mean more distortion.

B images of uint8. Each image draws its own operations and magnitudes; images that drew the same
operation are processed together. Random draws are made on the host, so the host never waits for the
device.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acmoe.data.images import transforms as image_ops
from acmoe.data.images.order import Share
from acmoe.data.transfer import to_device

Strength = NDArray[np.float64]  # (B,) magnitude / 10, in [0, 1]
Sign = NDArray[np.float64]  # (B,) -1 or 1
Operation = Callable[[Tensor, Strength, Sign], Tensor]

APPLIED = 0.5  # probability that a drawn operation is applied


def randaugment(
    images: Tensor,
    *,
    magnitude: float,
    std: float,
    ops: int,
    rng: np.random.Generator,
    share: Share | None = None,
) -> Tensor:
    """Apply `ops` random operations to each image, each with probability 1/2.

    Magnitudes are drawn from N(magnitude, std), clipped to [0, 10]. Draws are made for the whole
    batch of which the images are a `share`.
    """
    images = images.clone()
    rows, batch = share or Share.whole(len(images))
    operations = tuple(OPERATIONS.values())
    for _ in range(ops):
        choice_B = rng.integers(len(operations), size=batch)[rows]
        applied_B = rng.random(batch)[rows] < APPLIED
        strength_B = np.clip(rng.normal(magnitude, std, batch)[rows], 0, 10) / 10
        sign_B = rng.choice((-1.0, 1.0), batch)[rows]
        for number, operation in enumerate(operations):
            chosen = np.flatnonzero(applied_B & (choice_B == number))
            if len(chosen):
                index = to_device(chosen, images.device)
                images[index] = operation(images[index], strength_B[chosen], sign_B[chosen])
    return images


def _on(images: Tensor, values: NDArray[np.floating] | NDArray[np.integer]) -> Tensor:
    return to_device(values, images.device)


def _whole(values: Strength) -> NDArray[np.int64]:
    """Truncate magnitudes that count grey levels or bits to integers."""
    return values.astype(np.int64)


def _enhanced(enhance: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    """Return an enhancement. Its factor moves from 1, which changes nothing, to 0.1 or 1.9."""

    def operation(images: Tensor, strength: Strength, sign: Sign) -> Tensor:
        return enhance(images, _on(images, np.maximum(0.1, 1 + 0.9 * strength * sign)))

    return operation


def _posterize(images: Tensor, strength: Strength, sign: Sign) -> Tensor:
    # Keep at least one bit: with none the image would be black.
    return image_ops.posterize(images, _on(images, np.maximum(1, 4 - _whole(4 * strength))))


def _solarize(images: Tensor, strength: Strength, sign: Sign) -> Tensor:
    return image_ops.solarize(images, _on(images, 256 - _whole(256 * strength)))


def _solarize_add(images: Tensor, strength: Strength, sign: Sign) -> Tensor:
    return image_ops.solarize_add(images, _on(images, _whole(110 * strength)))


def _rotate(images: Tensor, strength: Strength, sign: Sign) -> Tensor:
    degrees = torch.from_numpy(30 * strength * sign)
    height, width = images.shape[-2:]
    matrix = image_ops.rotation_matrix(degrees, height=height, width=width)
    return image_ops.warp(images, to_device(matrix, images.device))


def _along(axis: int, most: float, *, shear: bool) -> Operation:
    """Return a shear by up to `most`, or a translation by up to that fraction of the side.

    Axis 0 is x, axis 1 is y.
    """

    def operation(images: Tensor, strength: Strength, sign: Sign) -> Tensor:
        side = 1 if shear else images.shape[-1 - axis]
        amount = torch.from_numpy(most * strength * sign) * side
        both = (amount, torch.zeros_like(amount))
        x, y = both if axis == 0 else both[::-1]
        matrix = image_ops.shear_matrix(x, y) if shear else image_ops.shift_matrix(x, y)
        return image_ops.warp(images, to_device(matrix, images.device))

    return operation


OPERATIONS: dict[str, Operation] = {
    "autocontrast": lambda images, strength, sign: image_ops.autocontrast(images),
    "equalize": lambda images, strength, sign: image_ops.equalize(images),
    "invert": lambda images, strength, sign: image_ops.invert(images),
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "saturation": _enhanced(image_ops.saturation),
    "contrast": _enhanced(image_ops.contrast),
    "brightness": _enhanced(image_ops.brightness),
    "sharpness": _enhanced(image_ops.sharpness),
    "shear_x": _along(0, 0.3, shear=True),
    "shear_y": _along(1, 0.3, shear=True),
    "shift_x": _along(0, 0.45, shear=False),
    "shift_y": _along(1, 0.45, shear=False),
}
