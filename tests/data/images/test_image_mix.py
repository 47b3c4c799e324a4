"""Mixing, erasing and moving, one pixel at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acmoe.data.images.mix import (
    cutmix,
    cutmix_box,
    erase,
    erase_boxes,
    mixup,
    shift,
    soft_targets,
)


def test_smoothing_leaves_most_on_the_label_and_shares_the_rest() -> None:
    # 4 classes, smoothing 0.1: 0.1 / 4 everywhere and 0.9 more on the label.
    targets = soft_targets(torch.tensor([2, 0]), 4, 0.1)
    wanted = [[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]]
    torch.testing.assert_close(targets, torch.tensor(wanted))
    assert soft_targets(torch.tensor([1]), 3, 0.0).tolist() == [[0, 1, 0]]


def test_mixup_mixes_an_image_with_the_one_at_the_mirrored_place(
    generator: torch.Generator,
) -> None:
    images = torch.randn(3, 3, 4, 4, generator=generator)
    targets = soft_targets(torch.tensor([0, 1, 2]), 3, 0.0)
    mixed, soft = mixup(images, targets, 0.75)
    for own, other in ((0, 2), (1, 1), (2, 0)):
        torch.testing.assert_close(mixed[own], 0.75 * images[own] + 0.25 * images[other])
        torch.testing.assert_close(soft[own], 0.75 * targets[own] + 0.25 * targets[other])


def test_cutmix_pastes_a_box_and_weighs_targets_by_its_area(generator: torch.Generator) -> None:
    images = torch.randn(2, 3, 4, 5, generator=generator)
    before = images.clone()
    targets = soft_targets(torch.tensor([0, 1]), 2, 0.0)
    mixed, soft = cutmix(images, targets, (1, 0, 3, 2))
    for y in range(4):
        for x in range(5):
            source = 1 if 1 <= y < 3 and x < 2 else 0
            assert torch.equal(mixed[0, :, y, x], images[source, :, y, x])
    # 4 of 20 pixels are the other image's.
    torch.testing.assert_close(soft[0], torch.tensor([0.8, 0.2]))
    assert torch.equal(images, before)


@given(st.integers(2, 40), st.integers(2, 40), st.floats(0, 1), st.integers(0, 99))
def test_a_cutmix_box_lies_in_the_image_and_is_no_larger_than_its_share(
    height: int, width: int, share: float, seed: int
) -> None:
    top, left, bottom, right = cutmix_box(height, width, share, np.random.default_rng(seed))
    assert 0 <= top <= bottom <= height and 0 <= left <= right <= width
    assert (bottom - top) * (right - left) <= (1 - share) * height * width + 1e-9


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_an_erased_box_lies_in_the_image_and_is_of_the_size_asked_for(
    height: int, width: int, seed: int
) -> None:
    for box in erase_boxes(5, height, width, 1.0, np.random.default_rng(seed)):
        top, left, bottom, right = box
        assert 0 <= top <= bottom <= height and 0 <= left <= right <= width
        # Sides are rounded to whole pixels.
        wanted = height * width / 3
        assert (bottom - top) * (right - left) <= wanted + (bottom - top + right - left) / 2 + 1


def test_boxes_are_drawn_with_the_probability_asked_for() -> None:
    boxes = erase_boxes(4000, 32, 32, 0.25, np.random.default_rng(0))
    drawn = sum(bottom > top for top, _, bottom, _ in boxes)
    # Binomial(4000, 1/4): 1000 +- 27.
    assert abs(drawn - 1000) < 110
    assert erase_boxes(9, 32, 32, 0.0, np.random.default_rng(0)) == [(0, 0, 0, 0)] * 9


def test_erasing_replaces_the_box_and_nothing_else(generator: torch.Generator) -> None:
    images = torch.randn(2, 3, 5, 6, generator=generator)
    noise = torch.randn(2, 3, 5, 6, generator=generator)
    found = erase(images, [(1, 2, 4, 5), (0, 0, 0, 0)], noise)
    for y in range(5):
        for x in range(6):
            source = noise if 1 <= y < 4 and 2 <= x < 5 else images
            assert torch.equal(found[0, :, y, x], source[0, :, y, x])
    assert torch.equal(found[1], images[1])


@pytest.mark.parametrize(("down", "right"), [(0, 0), (2, -1), (-2, 2), (1, 0)])
def test_a_shift_moves_every_pixel_and_zeros_move_in(down: int, right: int) -> None:
    images = torch.randint(1, 255, (2, 3, 5, 6), dtype=torch.uint8)
    found = shift(images, torch.tensor([0, down]), torch.tensor([0, right]), 2)
    assert torch.equal(found[0], images[0]) and found.dtype == torch.uint8
    for y in range(5):
        for x in range(6):
            inside = 0 <= y - down < 5 and 0 <= x - right < 6
            wanted = images[1, :, y - down, x - right] if inside else torch.zeros(3)
            assert found[1, :, y, x].tolist() == wanted.tolist()
