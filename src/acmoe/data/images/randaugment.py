"""RandAugment with magnitudes that always mean more distortion, on a whole batch at once.

B images of uint8. Every image draws its own operations and magnitudes; images that drew the same
operation are altered together. What is drawn stands on the host, so no step waits for the device.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acmoe.data.images import transforms as image_ops
from acmoe.data.transfer import to_device

Strength = NDArray[np.float64]  # (B,) magnitude / 10, in [0, 1]
Sign = NDArray[np.float64]  # (B,) -1 or 1
Operation = Callable[[Tensor, Strength, Sign], Tensor]

APPLIED = 0.5  # probability of each drawn operation


def randaugment(
    images: Tensor, *, magnitude: float, std: float, ops: int, rng: np.random.Generator
) -> Tensor:
    """`ops` operations for each image, one after the other, each applied half of the time."""
    images = images.clone()
    operations = tuple(OPERATIONS.values())
    for _ in range(ops):
        choice_B = rng.integers(len(operations), size=len(images))
        applied_B = rng.random(len(images)) < APPLIED
        strength_B = np.clip(rng.normal(magnitude, std, len(images)), 0, 10) / 10
        sign_B = rng.choice((-1.0, 1.0), len(images))
        for number, operation in enumerate(operations):
            own = np.flatnonzero(applied_B & (choice_B == number))
            if len(own):
                place = to_device(own, images.device)
                images[place] = operation(images[place], strength_B[own], sign_B[own])
    return images


def _on(images: Tensor, values: NDArray[np.floating] | NDArray[np.integer]) -> Tensor:
    return to_device(values, images.device)


def _whole(values: Strength) -> NDArray[np.int64]:
    """Magnitudes that count levels or bits are cut to whole ones."""
    return values.astype(np.int64)


def _enhanced(enhance: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    """Factors move away from 1, the image itself, to 0.1 or 1.9."""

    def operation(images: Tensor, strength: Strength, sign: Sign) -> Tensor:
        return enhance(images, _on(images, np.maximum(0.1, 1 + 0.9 * strength * sign)))

    return operation


def _posterize(images: Tensor, strength: Strength, sign: Sign) -> Tensor:
    # One bit at least: an image without any would be black.
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
    """Shear by up to `most`, or shift by up to that share of the side."""

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
