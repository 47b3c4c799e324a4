"""Operations on batches are Pillow's to one grey level, with each image's own strength."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from acmoe.data.images import transforms as image_ops
from vision_cases import random_pixels

FACTORS = torch.tensor([0.1, 0.55, 1.0, 1.45, 1.9], dtype=torch.float64)


def pictures(count: int = 5, side: int = 16, seed: int = 0) -> Tensor:
    """Noise of narrow and wide ranges, one flat image, and one with a gap in its levels."""
    pixels = random_pixels((count, side, side, 3), seed).astype(int)
    pixels[1] = 40 + pixels[1] // 4
    if count > 3:
        pixels[2] = 77
        pixels[3] = np.where(pixels[3] < 200, 10, 250)
    return torch.from_numpy(pixels.astype(np.uint8)).permute(0, 3, 1, 2).contiguous()


def by_pillow(images: Tensor, operation: Callable[[Image.Image, int], Image.Image]) -> Tensor:
    found = []
    for number, image in enumerate(images):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        found.append(torch.from_numpy(np.array(operation(picture, number))).permute(2, 0, 1))
    return torch.stack(found)


def difference(left: Tensor, right: Tensor) -> int:
    return int((left.int() - right.int()).abs().max())


@pytest.mark.parametrize(
    ("own", "pillows"),
    [
        (image_ops.invert, lambda image, _: ImageOps.invert(image)),
        (image_ops.equalize, lambda image, _: ImageOps.equalize(image)),
        (image_ops.autocontrast, lambda image, _: ImageOps.autocontrast(image)),
        (
            lambda x: image_ops.posterize(x, torch.tensor([1, 2, 3, 4, 8])),
            lambda image, n: ImageOps.posterize(image, (1, 2, 3, 4, 8)[n]),
        ),
        (
            lambda x: image_ops.solarize(x, torch.tensor([0, 60, 128, 200, 256])),
            lambda image, n: ImageOps.solarize(image, (0, 60, 128, 200, 256)[n]),
        ),
        (
            lambda x: image_ops.solarize_add(x, torch.tensor([0, 10, 50, 99, 110])),
            lambda image, n: image.point(
                [min(255, i + (0, 10, 50, 99, 110)[n]) if i < 128 else i for i in range(256)] * 3
            ),
        ),
        (
            lambda x: image_ops.grey(x).expand(-1, 3, -1, -1),
            lambda image, _: image.convert("L").convert("RGB"),
        ),
    ],
)
def test_operations_on_levels_are_pillows_exactly(
    own: Callable[[Tensor], Tensor], pillows: Callable[[Image.Image, int], Image.Image]
) -> None:
    images = pictures()
    assert difference(own(images), by_pillow(images, pillows)) == 0


def test_levels_of_a_large_image_are_equalized_as_pillow_does() -> None:
    images = pictures(3, side=64, seed=1)
    wanted = by_pillow(images, lambda image, _: ImageOps.equalize(image))
    assert difference(image_ops.equalize(images), wanted) == 0


@pytest.mark.parametrize(
    ("own", "pillows"),
    [
        (image_ops.brightness, ImageEnhance.Brightness),
        (image_ops.contrast, ImageEnhance.Contrast),
        (image_ops.saturation, ImageEnhance.Color),
        (image_ops.sharpness, ImageEnhance.Sharpness),
    ],
)
def test_enhancements_are_pillows_to_one_level(own: Callable[..., Tensor], pillows: type) -> None:
    images = pictures()
    wanted = by_pillow(images, lambda image, n: pillows(image).enhance(float(FACTORS[n])))
    assert difference(own(images, FACTORS), wanted) <= 1
    assert torch.equal(own(images, torch.ones(5)), images)


def test_an_image_too_small_to_smooth_is_kept() -> None:
    images = torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2)
    assert torch.equal(image_ops.sharpness(images, torch.tensor([1.9])), images)


def drawn_pictures(height: int, width: int) -> Tensor:
    """Noise, a ramp, waves and a chessboard: from hard to smooth edges."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    noise = torch.from_numpy(random_pixels((3, height, width)))
    ramp = torch.stack([255 * x / (width - 1), 255 * y / (height - 1), 2 * (x + y)])
    waves = torch.stack([128 + 100 * torch.sin(x / (4 + c) + y / (7 - c)) for c in range(3)])
    board = (255 * ((x // 5 + y // 7) % 2)).expand(3, -1, -1)
    return torch.stack([one.to(torch.uint8) for one in (noise, ramp, waves, board)])


@pytest.mark.parametrize("operation", ["rotate", "shear_x", "shear_y", "shift", "half"])
def test_geometry_is_pillows_to_one_level(operation: str) -> None:
    images = drawn_pictures(30, 40)
    amount = torch.tensor([0.2, -0.3, 0.07, -0.11], dtype=torch.float64)
    none = torch.zeros_like(amount)
    matrix = {
        "rotate": image_ops.rotation_matrix(100 * amount, height=30, width=40),
        "shear_x": image_ops.shear_matrix(amount, none),
        "shear_y": image_ops.shear_matrix(none, amount),
        "shift": image_ops.shift_matrix(40 * amount, 31 * amount),
        "half": image_ops.shift_matrix(none + 4.5, none - 2.5),
    }[operation]
    resample = Image.Resampling.BICUBIC
    fill = (124, 116, 104)

    def pillows(image: Image.Image, n: int) -> Image.Image:
        if operation == "rotate":
            return image.rotate(100 * float(amount[n]), resample, fillcolor=fill)
        coefficients = matrix[n].flatten().tolist()
        kind = Image.Transform.AFFINE
        return image.transform(image.size, kind, coefficients, resample, fillcolor=fill)

    found, wanted = image_ops.warp(images, matrix), by_pillow(images, pillows)
    assert difference(found, wanted) <= 1
    # They differ where a sum is a whole number but for rounding.
    assert (found != wanted).float().mean() < 0.05
    assert difference(found, images) > 50  # something moved


def test_no_movement_leaves_an_image_as_it_is() -> None:
    images = pictures()
    none = torch.zeros(5)
    for matrix in (
        image_ops.rotation_matrix(none, height=16, width=16),
        image_ops.shear_matrix(none, none),
        image_ops.shift_matrix(none, none),
    ):
        assert torch.equal(image_ops.warp(images, matrix), images)


def test_a_shift_by_whole_pixels_moves_them_and_fills_with_the_mean_colour() -> None:
    images = pictures()
    found = image_ops.warp(images, image_ops.shift_matrix(torch.full((5,), 3.0), torch.zeros(5)))
    assert torch.equal(found[..., :-3], images[..., 3:])
    assert found[..., -3:].flatten(2).unique(dim=-1).squeeze().tolist() == [[124, 116, 104]] * 5
