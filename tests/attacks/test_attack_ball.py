"""No perturbation exceeds eps or leaves the range of images, in exact arithmetic."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acmoe.attacks.ball import Ball
from acmoe.errors import UserError

RADII = st.sampled_from([1 / 255, 8 / 255, 0.1, 1.0, 1e-7, 3.3e-5, 0.3])


def pixels(seed: int, shape: tuple[int, ...] = (2, 3, 5, 5)) -> Tensor:
    """Bytes as shares of white, black and white among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, shape, generator=generator).float() / 255
    x[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
    return x


def exactly_within(x: Tensor, other: Tensor, eps: float) -> bool:
    # The difference of two such float32 numbers is exact in float64.
    return bool(((x.double() - other.double()).abs() <= eps).all())


@given(RADII, st.integers(0, 999), st.sampled_from([1e-8, 1e-3, 1.0, 1e6]))
def test_whatever_is_projected_is_within_eps_and_an_image(
    eps: float, seed: int, scale: float
) -> None:
    x = pixels(seed)
    noise = scale * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    ball = Ball(x, eps, (torch.zeros(1), torch.ones(1)))
    found = ball.project(x + noise)
    assert exactly_within(found, x, eps)
    assert float(found.min()) >= 0 and float(found.max()) <= 1
    assert torch.equal(ball.project(found), found)


@given(RADII, st.integers(0, 999))
def test_without_bounds_the_corners_are_as_far_as_eps_allows(eps: float, seed: int) -> None:
    x = (pixels(seed) - 0.45) / 0.22
    ball = Ball(x, eps)
    for corner, away in ((ball.low, -1), (ball.high, 1)):
        assert exactly_within(corner, x, eps)
        # The next float32 outwards is already too far.
        beyond = corner.nextafter(torch.full_like(corner, away * torch.inf))
        assert bool(((beyond.double() - x.double()).abs() > eps).all())


def test_what_is_inside_stays_where_it_is() -> None:
    x = pixels(0)
    near = (x + 0.004 * torch.randn(x.shape).clamp(-1, 1)).clamp(0, 1)
    assert torch.equal(Ball(x, 0.01, (torch.zeros(1), torch.ones(1))).project(near), near)


@given(RADII, st.integers(0, 99))
def test_a_random_start_lies_in_the_ball_and_fills_it(eps: float, seed: int) -> None:
    x = torch.full((1, 3, 20, 20), 0.5)
    start = Ball(x, eps).random(torch.Generator().manual_seed(seed))
    assert exactly_within(start, x, eps)
    if eps > 1e-4:  # elsewhere float32 has few numbers in the ball
        share = ((start - x) / eps).flatten()
        # Uniform on [-1, 1]: mean 0, variance 1/3, over 1200 pixels.
        assert abs(float(share.mean())) < 0.1 and abs(float(share.var()) - 1 / 3) < 0.05


def test_the_seed_decides_the_start() -> None:
    ball = Ball(pixels(0), 0.1)
    first, again, other = (ball.random(torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_images_outside_their_range_or_of_another_type_are_refused() -> None:
    with pytest.raises(UserError, match="numbers of the images lie outside the bounds"):
        Ball(torch.full((1, 3, 2, 2), 1.5), 0.1, (torch.zeros(1), torch.ones(1)))
    with pytest.raises(UserError, match=r"images of torch\.float64; attacks work in float32"):
        Ball(torch.zeros(1, 3, 2, 2, dtype=torch.float64), 0.1)
