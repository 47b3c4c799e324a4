"""Pillow's colour and geometry operations on whole batches, one strength for each image.

B images of uint8 in 3 colours, H rows, W columns. Every operation agrees with Pillow's to one grey
level; unlike Pillow it runs where the batch is, on all images at once.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from acmoe.data.transfer import constant

# Luminance as Pillow weighs it: integers of a fixed point with 16 bits behind it.
_LUMA = (19595, 38470, 7471)
_MEAN_COLOR = (124.0, 116.0, 104.0)  # ImageNet's, moved in where an image moves out


def invert(images: Tensor) -> Tensor:
    return 255 - images


def solarize(images: Tensor, threshold_B: Tensor) -> Tensor:
    """Invert what is as bright as the threshold."""
    return torch.where(images < threshold_B.view(-1, 1, 1, 1), images, 255 - images)


def solarize_add(images: Tensor, add_B: Tensor) -> Tensor:
    """Brighten the darker half of the range."""
    brighter = (images.int() + add_B.view(-1, 1, 1, 1)).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, brighter, images)


def posterize(images: Tensor, bits_B: Tensor) -> Tensor:
    """Keep the highest bits of each colour."""
    dropped = (8 - bits_B).view(-1, 1, 1, 1)
    return ((images.int() >> dropped) << dropped).to(torch.uint8)


def grey(images: Tensor) -> Tensor:
    """(B, 1, H, W) luminance, rounded."""
    red, green, blue = images.int().unbind(1)
    total = _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue
    return ((total + 0x8000) >> 16).to(torch.uint8)[:, None]


def blend(faded: Tensor, images: Tensor, factor_B: Tensor) -> Tensor:
    """faded + factor * (images - faded): 1 is the image, below 1 fades it, above exaggerates."""
    start = faded.float()
    mixed = start + factor_B.view(-1, 1, 1, 1).float() * (images.float() - start)
    return mixed.clamp(0, 255).to(torch.uint8)


def saturation(images: Tensor, factor_B: Tensor) -> Tensor:
    return blend(grey(images), images, factor_B)


def brightness(images: Tensor, factor_B: Tensor) -> Tensor:
    return blend(torch.zeros_like(images), images, factor_B)


def contrast(images: Tensor, factor_B: Tensor) -> Tensor:
    """Towards or away from the image's mean luminance."""
    mean_B111 = (grey(images).double().mean((1, 2, 3), keepdim=True) + 0.5).floor()
    return blend(mean_B111, images, factor_B)


def sharpness(images: Tensor, factor_B: Tensor) -> Tensor:
    """Towards or away from a smoothed image; its outermost pixels are not smoothed."""
    kernel = torch.ones(3, 1, 3, 3, device=images.device) / 13
    kernel[:, :, 1, 1] = 5 / 13
    smooth = images.float()
    if min(images.shape[-2:]) >= 3:
        inner = functional.conv2d(smooth, kernel, groups=3)
        smooth = smooth.clone()
        smooth[..., 1:-1, 1:-1] = (inner + 0.5).floor()
    return blend(smooth, images, factor_B)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each colour to the whole range."""
    low = images.amin((2, 3), keepdim=True).double()
    high = images.amax((2, 3), keepdim=True).double()
    scale = 255 / (high - low).clamp(min=1)
    stretched = (images.double() * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, images)


def equalize(images: Tensor) -> Tensor:
    """Spread each colour's levels so that all are used about equally often."""
    flat = images.flatten(2).long()
    count = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=images.device)
    count.scatter_add_(2, flat, torch.ones_like(flat))
    brightest = flat.amax(-1, keepdim=True)
    step = (flat.shape[-1] - count.gather(2, brightest)) // 255
    below = count.cumsum(-1) - count
    table = (step // 2 + below) // step.clamp(min=1)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device))
    return table.clamp(max=255).gather(2, flat).to(torch.uint8).view_as(images)


def warp(images: Tensor, matrix_B23: Tensor, mode: str = "bicubic") -> Tensor:
    """The pixel at p comes from matrix (p, 1), p = (x, y) counted from the upper left corner.

    What would come from outside the image is the mean colour.
    """
    height, width = images.shape[-2:]
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device) + 0.5
    place = torch.stack((x.expand(height, -1), y[:, None].expand(-1, width)), -1).view(-1, 2)
    matrix_B23 = matrix_B23.to(place)
    source = place @ matrix_B23[:, :, :2].mT + matrix_B23[:, None, :, 2]  # (B, H * W, 2)
    side = constant((width, height), images.device)
    inside = ((source >= 0) & (source < side)).all(-1).view(-1, 1, height, width)
    grid = (2 * source / side - 1).view(-1, height, width, 2)
    moved = functional.grid_sample(
        images.float(), grid, mode=mode, padding_mode="border", align_corners=False
    )
    fill = constant(_MEAN_COLOR, images.device).view(1, 3, 1, 1)
    return torch.where(inside, moved, fill).round().clamp(0, 255).to(torch.uint8)


def shear_matrix(x_B: Tensor, y_B: Tensor) -> Tensor:
    one, none = torch.ones_like(x_B), torch.zeros_like(x_B)
    return _matrix(one, x_B, none, y_B, one, none)


def shift_matrix(x_B: Tensor, y_B: Tensor) -> Tensor:
    """Offsets in pixels."""
    one, none = torch.ones_like(x_B), torch.zeros_like(x_B)
    return _matrix(one, none, x_B, none, one, y_B)


def rotation_matrix(degrees_B: Tensor, *, height: int, width: int) -> Tensor:
    """Counter-clockwise about the centre."""
    angle_B = degrees_B * (math.pi / 180)
    cos, sin = angle_B.cos(), angle_B.sin()
    x, y = width / 2, height / 2
    return _matrix(cos, -sin, x - x * cos + y * sin, sin, cos, y - x * sin - y * cos)


def _matrix(*entries_B: Tensor) -> Tensor:
    return torch.stack(entries_B, -1).view(-1, 2, 3)
