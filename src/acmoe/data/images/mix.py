"""Mixup, cutmix, random erasing and translation as pure functions. Random draws come from `rng`.

B images with C channels, H rows, W columns; K classes.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from acmoe.data.transfer import to_device

Box = tuple[int, int, int, int]  # top, left, bottom, right

ERASED_AREA = (0.02, 1 / 3)  # fraction of the image
ERASED_RATIO = (0.3, 1 / 0.3)  # height to width


def soft_targets(labels_B: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Return (B, K) targets: 1 - smoothing on the label, plus smoothing / K on every class."""
    share = smoothing / num_classes
    one_BK = functional.one_hot(labels_B, num_classes).float()
    return one_BK * (1 - smoothing) + share


def mixup(images: Tensor, targets_BK: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Blend image b with image B - 1 - b: `share` of the first, 1 - `share` of the second."""
    return (
        share * images + (1 - share) * images.flip(0),
        share * targets_BK + (1 - share) * targets_BK.flip(0),
    )


def cutmix(images: Tensor, targets_BK: Tensor, box: Box) -> tuple[Tensor, Tensor]:
    """Replace the box of image b by that of image B - 1 - b; targets are blended by area."""
    top, left, bottom, right = box
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = images.flip(0)[..., top:bottom, left:right]
    height, width = images.shape[-2:]
    share = 1 - (bottom - top) * (right - left) / (height * width)
    return mixed, share * targets_BK + (1 - share) * targets_BK.flip(0)


def cutmix_box(height: int, width: int, share: float, rng: np.random.Generator) -> Box:
    """Draw a box with 1 - `share` of the area around a random centre, clipped to the image."""
    side = math.sqrt(1 - share)
    high, wide = int(height * side), int(width * side)
    y, x = int(rng.integers(height)), int(rng.integers(width))
    return (
        max(y - high // 2, 0),
        max(x - wide // 2, 0),
        min(y + high // 2, height),
        min(x + wide // 2, width),
    )


def erase_boxes(
    count: int, height: int, width: int, probability: float, rng: np.random.Generator
) -> list[Box]:
    """Draw a box to erase for each image, with the given probability; otherwise an empty box."""
    return [
        _erase_box(height, width, rng) if rng.random() < probability else (0, 0, 0, 0)
        for _ in range(count)
    ]


def _erase_box(height: int, width: int, rng: np.random.Generator) -> Box:
    for _ in range(10):
        area = rng.uniform(*ERASED_AREA) * height * width
        ratio = math.exp(rng.uniform(*np.log(ERASED_RATIO)))
        high, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < high < height and 0 < wide < width:
            top, left = int(rng.integers(height - high + 1)), int(rng.integers(width - wide + 1))
            return top, left, top + high, left + wide
    return 0, 0, 0, 0


def erase(images: Tensor, boxes: Sequence[Box], noise: Tensor) -> Tensor:
    """Replace the box of each image by the values of `noise` at the same pixels."""
    height, width = images.shape[-2:]
    edges = to_device(torch.tensor(boxes).T.contiguous(), images.device)
    top, left, bottom, right = edges.view(4, -1, 1, 1, 1)
    y = torch.arange(height, device=images.device)[:, None]
    x = torch.arange(width, device=images.device)
    inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
    return torch.where(inside, noise, images)


def shift(images: Tensor, down_B: Tensor, right_B: Tensor, most: int) -> Tensor:
    """Translate each image by up to `most` whole pixels; uncovered pixels become 0."""
    height, width = images.shape[-2:]
    padded = functional.pad(images, (most, most, most, most))
    row_BH = torch.arange(height, device=images.device) + most - down_B[:, None]
    column_BW = torch.arange(width, device=images.device) + most - right_B[:, None]
    image_B = torch.arange(len(images), device=images.device)
    moved_BHWC = padded[image_B[:, None, None], :, row_BH[:, :, None], column_BW[:, None, :]]
    return moved_BHWC.permute(0, 3, 1, 2).contiguous()
