"""SPSA's estimate is the gradient, on average and ever closer; the attack follows it."""

import math

import pytest
import torch
from torch import Tensor, nn

from acmoe.attacks.attack import Work, perturb, work_of
from acmoe.attacks.spsa import spsa_gradient
from acmoe.attacks.target import Target, margin, white_box
from acmoe.config.images.attack import AnyAttack, FGSMConfig, PGDConfig, SPSAConfig
from acmoe.errors import UserError
from slow_cases import mostly_slow
from vision_cases import BATCH_STATISTICS, Convolutional, Linear, TinyMoE, seeded_model

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
SMALL = SPSAConfig(steps=5, directions=16)


def batch(count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return images, torch.arange(count) % 10


def estimate(slope: Tensor, directions: int, *, copies: int = 1, seed: int = 0) -> Tensor:
    """Estimate the gradient of the loss <slope, x> of each image."""

    def loss(x: Tensor) -> Tensor:
        return (x * slope.repeat(len(x) // len(slope), 1, 1, 1)).flatten(1).sum(1)

    return spsa_gradient(
        loss,
        torch.rand(slope.shape, dtype=slope.dtype, generator=torch.Generator().manual_seed(9)),
        directions=directions,
        delta=0.01,
        copies=copies,
        generator=torch.Generator().manual_seed(seed),
    )


def test_one_pixel_is_estimated_exactly() -> None:
    # v = +-1 and v * v = 1, so every direction gives the slope itself.
    slope = torch.tensor([2.5, -0.75], dtype=torch.float64).view(2, 1, 1, 1)
    torch.testing.assert_close(estimate(slope, 1), slope)


def test_the_estimate_is_unbiased_with_the_known_variance(generator: torch.Generator) -> None:
    # For a linear loss the estimate of entry i is g_i + sum_{j != i} g_j v_i v_j, averaged over n
    # directions: mean g_i, variance (|g|^2 - g_i^2) / n.
    slope = torch.randn(3, 3, 4, 4, generator=generator, dtype=torch.float64)
    n = 2000
    error = estimate(slope, n) - slope
    total = slope.square().flatten(1).sum(1).view(-1, 1, 1, 1)
    z = error / ((total - slope.square()) / n).sqrt()
    # 144 nearly normal numbers: the mean within 4 / 12, the mean square within 4 sqrt(2 / 144).
    assert abs(float(z.mean())) < 0.34
    assert abs(float(z.square().mean()) - 1) < 0.48


def test_the_error_falls_with_the_root_of_the_directions(generator: torch.Generator) -> None:
    slope = torch.randn(4, 3, 4, 4, generator=generator, dtype=torch.float64)
    few, many = (
        float((estimate(slope, n, seed=n) - slope).square().mean().sqrt()) for n in (25, 2500)
    )
    assert 8 < few / many < 12.5


def test_a_curved_loss_has_no_first_order_bias(generator: torch.Generator) -> None:
    # Central differences of x^2 are exact: one pixel an image, slope 2 x.
    x = torch.rand(5, 1, 1, 1, generator=generator, dtype=torch.float64)
    found = spsa_gradient(
        lambda at: at.square().flatten(1).sum(1),
        x,
        directions=3,
        delta=0.3,
        copies=2,
        generator=generator,
    )
    torch.testing.assert_close(found, 2 * x)


def test_copies_in_one_pass_change_nothing_but_the_number_of_passes(
    generator: torch.Generator,
) -> None:
    slope = torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
    one = estimate(slope, 7)
    for copies in (2, 3, 7, 50):
        torch.testing.assert_close(estimate(slope, 7, copies=copies), one)


def test_the_estimate_on_a_classifier_points_along_its_gradient() -> None:
    model = seeded_model(lambda: Linear(10, 8))
    target = Target(model, mean=MEAN, std=STD)
    images, labels = batch()
    x = target.enter(images)
    free = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(margin(target(free), labels).sum(), free)
    found = spsa_gradient(
        lambda at: margin(target(at), labels.repeat(len(at) // len(labels))).detach(),
        x,
        directions=1024,
        delta=0.01,
        copies=64,
        generator=torch.Generator().manual_seed(0),
    )
    # cos = 1 / sqrt(1 + d / n) with d = 192 pixels: 0.92.
    cosine = torch.cosine_similarity(found.flatten(1), exact.flatten(1))
    assert bool((cosine > 0.88).all())


class Listening(nn.Module):
    """Passes images on and remembers them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.heard: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.heard.append(images)
        answer: Tensor = self.inner(images)
        return answer


def listened(estimate_at: str) -> tuple[Listening, Tensor, Tensor]:
    model = Listening(seeded_model(lambda: Linear(10, 8)))
    target = Target(model, mean=MEAN, std=STD, space="normalized", clamp=False)
    images, labels = batch()
    x = target.enter(images)
    config = SPSAConfig(steps=3, directions=4, estimate_at=estimate_at)
    return model, x, perturb(target, x, labels, 1.0, config, seed=0)


def test_the_classifier_is_asked_around_the_current_image() -> None:
    model, x, found = listened("iterate")
    assert len(model.heard) == 3 * 4 * 2  # steps, directions, both ways
    points = torch.stack(model.heard).view(3, 4, 2, *x.shape)
    centre = points.mean(2)
    # Every pair lies delta to both sides of one centre: the perturbed image of that step.
    torch.testing.assert_close(
        (points - centre[:, :, None]).abs(), torch.full_like(points, 0.01), atol=1e-5, rtol=0
    )
    assert bool(((centre - x).abs() <= 1.0 + 1e-5).all())
    assert float((centre[0, 0] - x).abs().max()) > 0.5  # a random start, far from the clean image
    # Adam's steps are of about the learning rate.
    moved = (centre[1, 0] - centre[0, 0]).abs()
    inside = (centre[0, 0] - x).abs() < 0.9
    torch.testing.assert_close(
        moved[inside], torch.full_like(moved[inside], 0.01), atol=2e-4, rtol=0
    )
    assert not torch.equal(found, x)


def test_the_papers_mistake_asks_around_twice_the_clean_image() -> None:
    model, x, _ = listened("double")
    for points in model.heard:
        torch.testing.assert_close(
            (points - 2 * x).abs(), torch.full_like(x, 0.01), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("make", [Convolutional, lambda: TinyMoE(BATCH_STATISTICS)])
def test_the_attack_lowers_the_margin(make: type[nn.Module]) -> None:
    model = seeded_model(make)
    target = Target(model, mean=MEAN, std=STD)
    images, labels = batch()
    x = target.enter(images)
    with white_box(model), torch.no_grad():
        attack = SPSAConfig(directions=32, copies=32)
        found = perturb(target, x, labels, 0.1, attack, seed=0)
        before, after = margin(target(x), labels), margin(target(found), labels)
    assert bool((after < before).all())


@mostly_slow("eps", [1 / 255, 8 / 255, 1.0], keep=(1,))
@pytest.mark.parametrize(("space", "clamp"), [("pixel", True), ("normalized", False)])
def test_no_attack_exceeds_eps_or_leaves_the_range(eps: float, space: str, clamp: bool) -> None:
    model = seeded_model(Convolutional)
    target = Target(model, mean=MEAN, std=STD, space=space, clamp=clamp)
    images, labels = batch()
    x = target.enter(images)
    found = perturb(target, x, labels, eps, SMALL, seed=1)
    assert bool(((found.double() - x.double()).abs() <= eps).all())
    assert not clamp or (float(found.min()) >= 0 and float(found.max()) <= 1)
    assert found.grad is None and not found.requires_grad


@pytest.mark.parametrize(
    ("attack", "work", "told"),
    [
        (FGSMConfig(), Work(1, "batches"), [1]),
        (PGDConfig(steps=3), Work(3, "steps"), [1, 1, 1]),
        # Two steps of 5 directions, of which 2 are scored at once.
        (SPSAConfig(steps=2, directions=5, copies=2), Work(10, "directions"), [2, 2, 1, 2, 2, 1]),
    ],
)
def test_an_attack_tells_its_progress(attack: AnyAttack, work: Work, told: list[int]) -> None:
    target = Target(seeded_model(lambda: Linear(10, 8)), mean=MEAN, std=STD)
    images, labels = batch()
    heard: list[int] = []
    perturb(target, target.enter(images), labels, 0.1, attack, seed=0, advance=heard.append)
    assert heard == told
    assert work_of(attack) == work and sum(told) == work.amount


def test_no_gradient_of_the_classifier_is_needed() -> None:
    class Opaque(nn.Module):
        """Answers computed outside of autograd, as by a service."""

        def forward(self, x: Tensor) -> Tensor:
            total = x.detach().double().numpy().reshape(len(x), 3, -1).sum(-1)
            return torch.tensor(total, dtype=torch.float32)

    target = Target(Opaque(), mean=MEAN, std=STD)
    images, _ = batch()
    x = target.enter(images)
    labels = target(x).argmax(1)
    found = perturb(target, x, labels, 0.1, SMALL, seed=0)
    assert bool((margin(target(found), labels) < margin(target(x), labels)).all())


def test_the_seed_decides_everything_drawn() -> None:
    model = seeded_model(Convolutional)
    target = Target(model, mean=MEAN, std=STD)
    images, labels = batch()
    x = target.enter(images)
    state = torch.random.get_rng_state()
    first, again, other = (perturb(target, x, labels, 0.1, SMALL, seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert math.isclose(SPSAConfig().delta, 0.01) and SPSAConfig().directions == 128


def test_answers_that_are_no_numbers_are_refused() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :2] * math.nan

    target = Target(Broken(), mean=MEAN, std=STD)
    with pytest.raises(UserError, match="gradient with respect to an image is not finite"):
        perturb(target, torch.rand(2, 3, 4, 4), torch.tensor([0, 1]), 0.1, SMALL, seed=0)
