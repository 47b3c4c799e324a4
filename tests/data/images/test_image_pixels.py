"""Every kind of image becomes three colours of bytes; a broken one is named in one line."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from acmoe.data.images.pixels import (
    array_to_rgb,
    centre_crop,
    decode,
    random_box,
    random_crop,
    resize_box,
)
from acmoe.errors import UserError
from vision_cases import random_pixels


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_grey_is_repeated_in_every_colour() -> None:
    grey = random_pixels((5, 7))
    assert np.array_equal(decode(encoded(Image.fromarray(grey)), "x"), np.stack([grey] * 3, -1))


def test_rgb_is_kept_and_transparency_left_out() -> None:
    rgba = random_pixels((5, 7, 4))
    assert np.array_equal(decode(encoded(Image.fromarray(rgba)), "x"), rgba[..., :3])
    assert np.array_equal(decode(encoded(Image.fromarray(rgba[..., :3])), "x"), rgba[..., :3])


def test_grey_with_transparency_keeps_its_grey() -> None:
    pair = random_pixels((4, 4, 2))
    found = decode(encoded(Image.fromarray(pair, "LA")), "x")
    assert np.array_equal(found, np.stack([pair[..., 0]] * 3, -1))


def test_cmyk_files_as_they_occur_in_imagenet_become_rgb() -> None:
    # Full ink of a colour leaves none of its complement; no ink at all is white.
    inks = np.zeros((16, 48, 4), np.uint8)
    inks[:, :16, 0] = 255  # cyan: red is gone
    inks[:, 16:32, 3] = 255  # black
    file = encoded(Image.fromarray(inks, "CMYK"), "JPEG", quality=100)
    found = decode(file, "x")
    for column, expected in ((8, (0, 255, 255)), (24, (0, 0, 0)), (40, (255, 255, 255))):
        assert np.abs(found[8, column].astype(int) - expected).max() <= 4


def test_a_palette_with_transparent_entries_keeps_its_colours() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    found = decode(encoded(image, transparency=bytes([0, 255])), "x")
    assert found.tolist() == [[[255, 0, 0], [0, 0, 255]]]


def test_sixteen_bits_of_grey_keep_their_highest_eight() -> None:
    wide = np.array([[0, 255, 256, 65535]], np.uint16)
    assert decode(encoded(Image.fromarray(wide)), "x")[0, :, 0].tolist() == [0, 0, 1, 255]


def test_one_bit_a_pixel_is_black_or_white() -> None:
    image = Image.fromarray(np.array([[True, False]]))
    assert decode(encoded(image), "x")[0, :, 1].tolist() == [255, 0]


def test_floating_point_pixels_are_refused() -> None:
    image = Image.fromarray(np.zeros((2, 2), np.float32))
    with pytest.raises(UserError, match=r"^x\.tif holds floating-point pixels"):
        decode(encoded(image, "TIFF"), "x.tif")


def test_a_rotation_noted_in_the_file_is_not_applied_as_in_torchvision() -> None:
    """torchvision's ImageFolder reads `Image.open(file).convert("RGB")`: the stored rows."""
    noted = Image.Exif()
    noted[0x0112] = 6  # orientation: turn by 90 degrees to see it upright
    pixels = random_pixels((4, 7, 3))
    file = encoded(Image.fromarray(pixels), exif=noted)
    assert np.array_equal(decode(file, "turned.png"), pixels)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_truncated_file_is_named(kind: str) -> None:
    whole = encoded(Image.fromarray(random_pixels((64, 64, 3))), kind)
    with pytest.raises(UserError, match=r"^cat\.img is no readable image \(.*\); fetch it again"):
        decode(whole[: len(whole) // 2], "cat.img")


@pytest.mark.parametrize("junk", [b"", b"hi", b"\x89PNG\r\n\x1a\n" + b"\0" * 40, b"\xff\xd8\xff"])
def test_what_is_no_image_is_named_in_one_line(junk: bytes) -> None:
    with pytest.raises(UserError, match=r"^dog\.png is no readable image") as caught:
        decode(junk, "dog.png")
    assert "\n" not in str(caught.value)


def test_a_vanished_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.png is missing"):
        decode(tmp_path / "gone.png", "gone.png")


def test_an_image_too_large_to_be_honest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = encoded(Image.new("RGB", (30, 30)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UserError, match="bomb is no readable image"):
        decode(file, "bomb")


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (np.zeros((2, 2, 3), np.float32), "holds float32 pixels"),
        (np.zeros((2, 2, 2), np.uint8), r"has shape \(2, 2, 2\)"),
        (np.zeros((2, 2, 3, 1), np.uint8), r"has shape \(2, 2, 3, 1\)"),
        (np.zeros((0, 2, 3), np.uint8), "has no pixels"),
    ],
)
def test_arrays_of_another_form_are_refused(array: np.ndarray, complaint: str) -> None:
    with pytest.raises(UserError, match=f"^x {complaint}"):
        array_to_rgb(array, "x")


def test_resizing_is_pillows_bicubic_on_the_box() -> None:
    pixels = random_pixels((30, 40, 3))
    wanted = Image.fromarray(pixels[4:24, 10:40]).resize((9, 11), Image.Resampling.BICUBIC)
    found = resize_box(pixels, (10, 4, 40, 24), (9, 11))
    # With a box the filter may look at pixels just outside it; the inside is the same.
    inside = (slice(2, -2), slice(2, -2))
    assert np.abs(found[inside].astype(int) - np.asarray(wanted)[inside]).max() <= 1


def test_the_evaluation_crop_is_the_centre_of_the_shorter_side_resized() -> None:
    # 400 x 300 -> shorter side 256 gives 341 x 256, of which the central 224 x 224 remain:
    # rows 16 to 240, columns round(58.5) = 58 to 282.
    pixels = random_pixels((300, 400, 3))
    whole = np.asarray(Image.fromarray(pixels).resize((341, 256), Image.Resampling.BICUBIC))
    found = centre_crop(pixels, resize=256, size=224)
    assert np.array_equal(found, whole[16:240, 58:282])


def test_an_image_of_the_right_size_is_not_touched() -> None:
    pixels = random_pixels((8, 8, 3))
    assert np.array_equal(centre_crop(pixels, resize=8, size=8), pixels)


@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([(0.08, 1.0), (1.0, 1.0), (0.01, 0.02)]),
    st.integers(0, 2**32),
)
def test_a_random_box_lies_in_the_image_and_has_the_ratio_asked_for(
    height: int, width: int, area: tuple[float, float], seed: int
) -> None:
    ratio = (3 / 4, 4 / 3)
    left, top, right, bottom = random_box(height, width, area, ratio, np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    # Sides are whole pixels: each may be half a pixel off.
    wide, high = right - left, bottom - top
    assert (wide + 1) / max(high - 1, 0.5) >= ratio[0] and (wide - 1) / (high + 1) <= ratio[1]


def test_random_boxes_cover_the_area_asked_for_evenly() -> None:
    rng = np.random.default_rng(0)
    boxes = [random_box(300, 300, (0.08, 1.0), (3 / 4, 4 / 3), rng) for _ in range(2000)]
    shares = [(r - l) * (b - t) / 90_000 for l, t, r, b in boxes]  # noqa: E741
    assert 0.07 < min(shares) < 0.12 and max(shares) > 0.9
    # Uniform on [0.08, 1] has mean 0.54; large boxes of odd ratio fit less often.
    assert 0.45 < float(np.mean(shares)) < 0.56


def test_a_random_crop_has_the_size_asked_for() -> None:
    rng = np.random.default_rng(1)
    found = random_crop(
        random_pixels((33, 71, 3)), size=16, area=(0.08, 1.0), ratio=(0.75, 1.33), rng=rng
    )
    assert found.shape == (16, 16, 3) and found.dtype == np.uint8
