"""The looks of experts: told apart by every common kind of sight, and without colour at all."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from acmoe.analyze.figures.palette import (
    COLOURS,
    OKABE_ITO,
    ROUTER_LOOKS,
    expert_colour,
    expert_marker,
    faded,
    ink_on,
    luminance,
    rgb,
)

# Linear RGB as seen with a full deficiency of one cone (Machado, Oliveira and Fernandes 2009).
SIGHTS = {
    "full": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# Ottosson's OKLab: linear RGB to cone responses, whose cube roots mix to lightness and hues.
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def seen(colour: str, sight: str) -> NDArray[np.float64]:
    part = np.array(rgb(colour))
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    looks = np.clip(np.array(SIGHTS[sight]) @ linear, 0, 1)
    lab: NDArray[np.float64] = np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ looks)
    return lab


def closest(colours: tuple[str, ...]) -> float:
    """Least distance of any two under any kind of sight."""
    return min(
        float(np.linalg.norm(seen(one, sight) - seen(other, sight)))
        for sight in SIGHTS
        for one, other in itertools.combinations(colours, 2)
    )


def test_sixteen_experts_are_as_far_apart_as_the_eight_of_okabe_and_ito() -> None:
    assert len(set(COLOURS)) == 16
    assert closest(COLOURS) == closest(OKABE_ITO)
    # For scale: red beside green of one lightness, the usual mistake.
    assert closest(("#C03030", "#3A7D3A")) < closest(OKABE_ITO)


def test_more_experts_than_colours_still_have_looks_of_their_own() -> None:
    looks = {(expert_colour(expert), expert_marker(expert)) for expert in range(208)}
    assert len(looks) == 208


def test_each_channel_alone_tells_the_routers_apart() -> None:
    for channel in zip(*ROUTER_LOOKS, strict=True):
        assert len(set(channel)) == len(ROUTER_LOOKS)


def test_luminance_is_that_of_the_standard() -> None:
    assert luminance("#000000") == 0
    assert abs(luminance("#FFFFFF") - 1) < 1e-12
    # 0x80 / 255 = 0.50196; ((0.50196 + 0.055) / 1.055) ** 2.4 = 0.21586; green weighs 0.7152.
    assert abs(luminance("#008000") - 0.15438) < 1e-5


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 255))
def test_writing_has_a_contrast_of_four_and_a_half_on_any_colour(r: int, g: int, b: int) -> None:
    paper = f"#{r:02X}{g:02X}{b:02X}"
    bright, dark = sorted((luminance(paper), luminance(ink_on(paper))), reverse=True)
    assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_fading_mixes_with_white_paper() -> None:
    assert faded("#0072B2", 1.0) == "#0072B2"
    assert faded("#0072B2", 0.0) == "#FFFFFF"
    # Half way from 0x00 to 0xFF is 127.5, from 0x72 = 114 it is 184.5; both round to even.
    assert faded("#0072B2", 0.5) == "#80B8D8"
