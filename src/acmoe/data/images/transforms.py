"""Colour and geometry operations on whole batches, with one strength per image.

B images of uint8 with 3 channels, H rows, W columns. The operations run on the device of the batch.

Compared with Pillow (tests/data/images/test_image_ops.py):
  invert, solarize, solarize_add, posterize, grey, autocontrast, equalize   equal
  brightness, contrast, saturation, sharpness                               within one grey level
  warp, bicubic and bilinear                                                within one grey level
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from acmoe.data.transfer import constant

# Pillow's luminance weights, as fixed-point numbers with 16 fractional bits.
_LUMA = (19595, 38470, 7471)
_MEAN_COLOR = (124.0, 116.0, 104.0)  # ImageNet's mean; fills pixels from outside the image


def invert(images: Tensor) -> Tensor:
    return 255 - images


def solarize(images: Tensor, threshold_B: Tensor) -> Tensor:
    """Invert values at or above the threshold."""
    return torch.where(images < threshold_B.view(-1, 1, 1, 1), images, 255 - images)


def solarize_add(images: Tensor, add_B: Tensor) -> Tensor:
    """Add to values below 128."""
    brighter = (images.int() + add_B.view(-1, 1, 1, 1)).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, brighter, images)


def posterize(images: Tensor, bits_B: Tensor) -> Tensor:
    """Keep the highest `bits_B` bits of each value."""
    dropped = (8 - bits_B).view(-1, 1, 1, 1)
    return ((images.int() >> dropped) << dropped).to(torch.uint8)


def grey(images: Tensor) -> Tensor:
    """Return the luminance, rounded, as (B, 1, H, W) uint8."""
    red, green, blue = images.int().unbind(1)
    total = _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue
    return ((total + 0x8000) >> 16).to(torch.uint8)[:, None]


def blend(faded: Tensor, images: Tensor, factor_B: Tensor) -> Tensor:
    """Return faded + factor * (images - faded).

    Factor 1 gives the image itself; smaller ones move it towards `faded`, greater ones away.
    """
    start = faded.float()
    mixed = start + factor_B.view(-1, 1, 1, 1).float() * (images.float() - start)
    return mixed.clamp(0, 255).to(torch.uint8)


def saturation(images: Tensor, factor_B: Tensor) -> Tensor:
    return blend(grey(images), images, factor_B)


def brightness(images: Tensor, factor_B: Tensor) -> Tensor:
    return blend(torch.zeros_like(images), images, factor_B)


def contrast(images: Tensor, factor_B: Tensor) -> Tensor:
    """Blend with the mean luminance of the image."""
    grey_B1YX = grey(images)
    pixels = grey_B1YX[0].numel()
    total_B111 = grey_B1YX.sum((1, 2, 3), keepdim=True, dtype=torch.int64)
    mean_B111 = (2 * total_B111 + pixels) // (2 * pixels)  # rounded half up, in integers
    return blend(mean_B111, images, factor_B)


def sharpness(images: Tensor, factor_B: Tensor) -> Tensor:
    """Blend with a smoothed copy of the image, whose outermost pixels are not smoothed."""
    kernel = torch.ones(3, 1, 3, 3, device=images.device) / 13
    kernel[:, :, 1, 1] = 5 / 13
    smooth = images.float()
    if min(images.shape[-2:]) >= 3:
        inner = functional.conv2d(smooth, kernel, groups=3)
        smooth = smooth.clone()
        smooth[..., 1:-1, 1:-1] = (inner + 0.5).floor()
    return blend(smooth, images, factor_B)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel linearly to the range 0 to 255."""
    if images.device.type == "mps":
        return stretch(images)
    low = images.amin((2, 3), keepdim=True).double()
    high = images.amax((2, 3), keepdim=True).double()
    scale = 255 / (high - low).clamp(min=1)
    stretched = (images.double() * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, images)


def stretch(images: Tensor) -> Tensor:
    """Compute `autocontrast` in integers, for a device without float64.

    It rounds 255 (v - low) / (high - low) down exactly. Pillow's float64 product falls short of the
    quotient in places where that is whole, and then gives one level less.
    """
    low = images.amin((2, 3), keepdim=True).int()
    high = images.amax((2, 3), keepdim=True).int()
    stretched = 255 * (images.int() - low) // (high - low).clamp(min=1)
    return torch.where(high > low, stretched.to(torch.uint8), images)


def equalize(images: Tensor) -> Tensor:
    """Equalise the histogram of each channel."""
    flat = images.flatten(2).long()
    count = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=images.device)
    count.scatter_add_(2, flat, torch.ones_like(flat))
    brightest = flat.amax(-1, keepdim=True)
    step = (flat.shape[-1] - count.gather(2, brightest)) // 255
    below = count.cumsum(-1) - count
    table = (step // 2 + below) // step.clamp(min=1)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device))
    return table.clamp(max=255).gather(2, flat).to(torch.uint8).view_as(images)


def warp(images: Tensor, matrix_B23: Tensor) -> Tensor:
    """Apply an affine map: output pixel p = (x, y) reads the input at matrix @ (x, y, 1).

    Coordinates count from the upper left corner. Positions outside the image give the mean colour;
    beyond the edge, interpolation reads the outermost pixel. Interpolation and rounding are
    Pillow's: cubic convolution with a = -1 (`grid_sample` has a = -0.75), truncated to a grey
    level.
    """
    height, width = images.shape[-2:]
    # In float64, as in Pillow: a position at the edge must not be rounded across it.
    matrix_B23 = matrix_B23.double()
    x_W = torch.arange(width, device=images.device) + 0.5
    y_H1 = torch.arange(height, device=images.device)[:, None] + 0.5
    x_BHW, y_BHW = (
        row_B3[:, 0, None, None] * x_W + row_B3[:, 1, None, None] * y_H1 + row_B3[:, 2, None, None]
        for row_B3 in matrix_B23.unbind(1)
    )
    inside_BHW = (x_BHW >= 0) & (x_BHW < width) & (y_BHW >= 0) & (y_BHW < height)
    columns, rows = _taps(x_BHW, width), _taps(y_BHW, height)
    flat = images.flatten(2).float()  # (B, 3, H * W)
    moved = torch.zeros_like(flat)
    for row_BHW, above_BHW in rows:
        for column_BHW, left_BHW in columns:
            index = (row_BHW * width + column_BHW).flatten(1)[:, None].expand_as(flat)
            moved += (above_BHW * left_BHW).flatten(1)[:, None] * flat.gather(2, index)
    fill = constant(_MEAN_COLOR, images.device).view(1, 3, 1, 1)
    moved = torch.where(inside_BHW[:, None], moved.view_as(images), fill)
    # A sum that is a whole number but for rounding is that number.
    return (moved + 1e-3).clamp(0, 255).to(torch.uint8)


def _taps(position_BHW: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return indices and weights of the four pixels that interpolation reads along one axis."""
    centre_BHW = position_BHW - 0.5
    before_BHW = centre_BHW.floor()
    d = (centre_BHW - before_BHW).float()
    weights = (
        ((2 - d) * d - 1) * d,
        (d - 2) * d * d + 1,
        ((1 - d) * d + 1) * d,
        (d - 1) * d * d,
    )
    # Far positions are outside: keep them in range.
    first_BHW = (before_BHW - 1).clamp(-4, size).long()
    return [
        ((first_BHW + number).clamp(0, size - 1), weight_BHW)
        for number, weight_BHW in enumerate(weights)
    ]


def shear_matrix(x_B: Tensor, y_B: Tensor) -> Tensor:
    """Return the (B, 2, 3) matrices of shears: x + x_B * y, y + y_B * x."""
    one, zero = torch.ones_like(x_B), torch.zeros_like(x_B)
    return _matrix(one, x_B, zero, y_B, one, zero)


def shift_matrix(x_B: Tensor, y_B: Tensor) -> Tensor:
    """Return the (B, 2, 3) matrices of translations, in pixels."""
    one, zero = torch.ones_like(x_B), torch.zeros_like(x_B)
    return _matrix(one, zero, x_B, zero, one, y_B)


def rotation_matrix(degrees_B: Tensor, *, height: int, width: int) -> Tensor:
    """Return the (B, 2, 3) matrices of counter-clockwise rotations about the image's centre."""
    angle_B = degrees_B * (math.pi / 180)
    cos, sin = angle_B.cos(), angle_B.sin()
    x, y = width / 2, height / 2
    return _matrix(cos, -sin, x - x * cos + y * sin, sin, cos, y - x * sin - y * cos)


def _matrix(*entries_B: Tensor) -> Tensor:
    return torch.stack(entries_B, -1).view(-1, 2, 3)
