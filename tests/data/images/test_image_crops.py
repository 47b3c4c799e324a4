"""Crops of a whole batch: boxes are drawn as one by one, and cut where they say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.data.images.crops import Boxes, cut_boxes, random_boxes
from acmoe.data.images.pixels import random_box, random_crop
from vision_cases import random_pixels

RATIO = (3 / 4, 4 / 3)


def boxes(count: int, side: int, area: tuple[float, float], seed: int = 0) -> Boxes:
    return random_boxes(count, side, area, RATIO, np.random.default_rng(seed))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.floats(0.05, 1.0), st.integers(0, 9))
def test_every_box_lies_in_the_image_on_whole_pixels(side: int, least: float, seed: int) -> None:
    found = boxes(50, side, (least, 1.0), seed)
    assert (found == np.rint(found)).all()
    left, top, wide, high = found.T
    assert (wide >= 1).all() and (high >= 1).all()
    assert (left >= 0).all() and (top >= 0).all()
    assert (left + wide <= side).all() and (top + high <= side).all()


def test_boxes_are_distributed_as_those_drawn_one_by_one() -> None:
    many, side, area = 4000, 112, (0.35, 1.0)
    left, top, wide, high = boxes(many, side, area).T
    together = np.stack((left, top, wide, high), -1)
    rng = np.random.default_rng(1)
    single = np.array([random_box(side, side, area, RATIO, rng) for _ in range(many)], float)
    single[:, 2:] -= single[:, :2]
    # Two means of 4,000 draws each: within 4 of their common standard error. The same of squares.
    for power in (1, 2):
        pair = together.astype(float) ** power, single**power
        error = np.sqrt(pair[0].var(0) / many + pair[1].var(0) / many)
        assert (abs(pair[0].mean(0) - pair[1].mean(0)) < 4 * error).all()
    share = wide * high / side**2
    assert share.min() > 0.34 and share.max() <= 1.0
    assert (wide / high).min() > 0.73 and (wide / high).max() < 1.37


def test_what_no_ratio_fits_is_taken_as_whole_as_the_ratio_allows() -> None:
    # The whole area, twice as wide as high: no such box fits a square of 10, the widest is 10 x 5.
    found = random_boxes(3, 10, (1.0, 1.0), (2.0, 2.0), np.random.default_rng(0))
    assert found.tolist() == [[0, 2, 10, 5]] * 3
    found = random_boxes(3, 10, (1.0, 1.0), (0.5, 0.5), np.random.default_rng(0))
    assert found.tolist() == [[2, 0, 5, 10]] * 3


def test_the_whole_image_at_its_own_size_is_the_image() -> None:
    images = torch.from_numpy(random_pixels((2, 3, 16, 16)))
    assert torch.equal(cut_boxes(images, torch.tensor([[0.0, 0, 16, 16]] * 2), 16), images)


def test_a_box_of_the_size_asked_for_is_cut_out_as_it_is() -> None:
    images = torch.from_numpy(random_pixels((2, 3, 16, 16)))
    found = cut_boxes(images, torch.tensor([[3.0, 5, 8, 8], [0, 8, 8, 8]]), 8)
    # Left counts columns, top rows.
    assert torch.equal(found[0], images[0, :, 5:13, 3:11])
    assert torch.equal(found[1], images[1, :, 8:16, 0:8])


def test_an_enlarged_box_is_what_pillow_makes_of_it() -> None:
    pytest.importorskip("PIL")
    ramp = np.linspace(0, 255, 32).astype(np.uint8)
    pixels = np.stack((np.tile(ramp, (32, 1)), np.tile(ramp[:, None], (1, 32))) * 2, -1)[..., :3]
    rng = np.random.default_rng(3)
    box = random_box(32, 32, (0.4, 0.6), RATIO, np.random.default_rng(3))
    wanted = random_crop(pixels, size=32, area=(0.4, 0.6), ratio=RATIO, rng=rng)
    left, top, right, bottom = box
    at = torch.tensor([[left, top, right - left, bottom - top]], dtype=torch.float32)
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()
    found = cut_boxes(images, at, 32)[0].permute(1, 2, 0).numpy()
    # Pillow repeats the box's own edge where this reads on: inside they agree to two levels.
    difference = abs(found[3:-3, 3:-3].astype(int) - wanted[3:-3, 3:-3].astype(int))
    assert difference.max() <= 2
