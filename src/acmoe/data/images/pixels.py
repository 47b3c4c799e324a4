"""Decode image files and arrays of any colour mode to (H, W, 3) uint8, and crop them.

H rows, W columns. Unreadable images raise a `UserError` that names the image.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acmoe.errors import UserError, check

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]

TRIES = 10  # draws of a random box, until one fits
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)


def pillow() -> Any:
    """Import and return the module `PIL.Image`, an optional dependency."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(
            "reading images needs the vision extra: pip install 'acmoe[vision]'"
        ) from error
    return Image


def decode(file: bytes | str | Path, where: str) -> Pixels:
    """Decode an image file to RGB; `where` names the image in errors."""
    with _opened(file, where) as image:
        image.load()
        return to_rgb(image, where)


def check_header(file: bytes | str | Path, where: str) -> None:
    """Raise a UserError if a file is missing or does not begin as an image; decode nothing."""
    with _opened(file, where):
        pass


@contextmanager
def _opened(file: bytes | str | Path, where: str) -> "Iterator[Image]":
    """Open an image file; what fails inside `with` becomes a UserError that names the image."""
    module = pillow()
    try:
        with module.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            yield image
    except UserError:
        raise
    except FileNotFoundError as error:
        if isinstance(file, (str, Path)) and Path(file).is_symlink():
            raise UserError(
                f"{where} is a link to a missing file; restore the file, or remove the link"
            ) from error
        raise UserError(f"{where} is missing, and was there before; start again") from error
    except (*_BROKEN, module.DecompressionBombError) as error:
        reason = str(error).splitlines()[0].partition(" <")[0] or type(error).__name__
        raise UserError(
            f"{where} is no readable image ({reason}); fetch it again or put another in its place; "
            "to remove it is safe until a training has begun"
        ) from error


def to_rgb(image: "Image", where: str) -> Pixels:
    """Convert an image of any mode to RGB: grey is repeated, CMYK converted, alpha dropped."""
    mode = image.mode
    if mode.startswith("I"):  # 16 bits per pixel: `convert` would clip values at 255
        wide_HW = np.asarray(image).astype(np.int64)
        check(
            wide_HW.min(initial=0) >= 0 and wide_HW.max(initial=0) < 1 << 16,
            f"{where} has values outside 16 bits; convert it to 8 bits a colour",
        )
        return array_to_rgb((wide_HW >> 8).astype(np.uint8), where)
    check(mode != "F", f"{where} holds floating-point pixels; convert it to 8 bits a colour")
    if "transparency" in image.info:
        image = image.convert("RGBA")  # a palette with transparency needs this step before RGB
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def array_to_rgb(pixels: NDArray[Any], where: str) -> Pixels:
    """Convert (H, W), or (H, W, channels) with 1 (grey), 3 (RGB) or 4 (RGBA) channels, to RGB."""
    check(
        pixels.dtype == np.uint8,
        f"{where} holds {pixels.dtype} pixels; give uint8, 0 to 255",
    )
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    check(
        pixels.ndim == 3 and pixels.shape[-1] in (1, 3, 4),
        f"{where} has shape {pixels.shape}; give (height, width) or (height, width, channels) "
        "with 1, 3 or 4 channels",
    )
    check(pixels.size > 0, f"{where} has no pixels: its shape is {pixels.shape}; remove it")
    if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    return np.ascontiguousarray(pixels[..., :3])


def resize_box(pixels: Pixels, box: tuple[int, int, int, int], size: tuple[int, int]) -> Pixels:
    """Resize a box (left, top, right, bottom) to (width, height) `size`, bicubic, antialiased."""
    left, top, right, bottom = box
    if (right - left, bottom - top) == size:
        return pixels[top:bottom, left:right]
    module = pillow()
    image = module.fromarray(pixels).resize(size, module.Resampling.BICUBIC, box=box)
    return np.asarray(image)


def centre_crop(pixels: Pixels, *, resize: int, size: int) -> Pixels:
    """Resize the shorter side to `resize`, then cut out the central `size` x `size` pixels."""
    height, width = pixels.shape[:2]
    short = min(height, width)
    wide, high = width * resize // short, height * resize // short
    pixels = resize_box(pixels, (0, 0, width, height), (wide, high))
    top, left = round((high - size) / 2), round((wide - size) / 2)
    return pixels[top : top + size, left : left + size]


def random_crop(
    pixels: Pixels,
    *,
    size: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Pixels:
    """Resize a random box of the image (see `random_box`) to `size` x `size` pixels."""
    height, width = pixels.shape[:2]
    return resize_box(pixels, random_box(height, width, area, ratio, rng), (size, size))


def random_box(
    height: int,
    width: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> tuple[int, int, int, int]:
    """Draw a box (left, top, right, bottom) with a random area and aspect ratio.

    `area` is a range of fractions of the image, `ratio` a range of width / height. Where none of
    TRIES draws fits, the box is the largest central one that the ratio allows.
    """
    for _ in range(TRIES):
        share = rng.uniform(*area) * height * width
        aspect = np.exp(rng.uniform(*np.log(ratio)))
        wide, high = round((share * aspect) ** 0.5), round((share / aspect) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, top = rng.integers(0, width - wide + 1), rng.integers(0, height - high + 1)
            return int(left), int(top), int(left) + wide, int(top) + high
    aspect = min(max(width / height, ratio[0]), ratio[1])
    wide, high = min(width, round(height * aspect)), min(height, round(width / aspect))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + max(wide, 1), top + max(high, 1)
