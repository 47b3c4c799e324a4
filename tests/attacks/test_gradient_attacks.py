"""FGSM and PGD agree with loops over pixels, and do what an attack must."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from acmoe.attacks.attack import perturb
from acmoe.attacks.ball import Ball
from acmoe.attacks.target import Target, white_box
from acmoe.config.images.attack import FGSMConfig, PGDConfig
from slow_cases import mostly_slow
from vision_cases import BATCH_STATISTICS, Convolutional, Linear, TinyMoE, seeded_model

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
SPACES = [("pixel", True), ("pixel", False), ("normalized", False)]


def batch(seed: int = 0, count: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return images, torch.arange(count) % 10


def linear_gradient(model: Linear, x: np.ndarray, label: int, space: str) -> np.ndarray:
    """d CE / d x of one image by hand, in float64: W^T (softmax - one hot), over std in pixels."""
    weight = model.head.weight.detach().double().numpy().reshape(10, 3, 8, 8)
    bias = model.head.bias.detach().double().numpy()
    std = np.asarray(STD).reshape(3, 1, 1)
    seen = (x - np.asarray(MEAN).reshape(3, 1, 1)) / std if space == "pixel" else x
    logits = np.array([(weight[k] * seen).sum() + bias[k] for k in range(10)])
    share = np.exp(logits - logits.max())
    share /= share.sum()
    share[label] -= 1
    gradient = sum(share[k] * weight[k] for k in range(10))
    return gradient / std if space == "pixel" else gradient


def loop_attack(
    model: Linear,
    x: np.ndarray,
    label: int,
    eps: float,
    *,
    steps: int,
    step: float,
    start: np.ndarray,
    space: str,
    clamp: bool,
) -> np.ndarray:
    """Projected steps on one image, one pixel at a time."""
    now = start.copy()
    for _ in range(steps):
        gradient = linear_gradient(model, now, label, space)
        for place in np.ndindex(*now.shape):
            moved = now[place] + step * np.sign(gradient[place])
            moved = min(max(moved, x[place] - eps), x[place] + eps)
            now[place] = min(max(moved, 0.0), 1.0) if clamp else moved
    return now


@pytest.mark.parametrize(
    ("space", "clamp"), [("pixel", True), ("pixel", False), ("normalized", False)]
)
@pytest.mark.parametrize("name", ["fgsm", "pgd", "pgd-started"])
def test_the_attack_of_a_loop_is_found(name: str, space: str, clamp: bool) -> None:
    model = seeded_model(lambda: Linear(10, 8))
    target = Target(model, mean=MEAN, std=STD, space=space, clamp=clamp)
    images, labels = batch(count=2)
    x, eps = target.enter(images), 8 / 255
    attack = FGSMConfig() if name == "fgsm" else PGDConfig(steps=5, random_start="started" in name)
    found = perturb(target, x, labels, eps, attack, seed=7)
    start = x.clone()
    if "started" in name:
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(7))
        start = x + (2 * noise - 1) * eps
        start = start.clamp(0, 1) if clamp else start
    for number in range(2):
        wanted = loop_attack(
            model,
            x[number].double().numpy(),
            int(labels[number]),
            eps,
            steps=1 if name == "fgsm" else 5,
            step=eps if name == "fgsm" else 0.15 * eps,
            start=start[number].double().numpy(),
            space=space,
            clamp=clamp,
        )
        np.testing.assert_allclose(found[number].numpy(), wanted, atol=1e-6)


def test_a_batch_is_attacked_as_its_images_one_by_one() -> None:
    model = seeded_model(Convolutional)
    target = Target(model, mean=MEAN, std=STD)
    images, labels = batch()
    x = target.enter(images)
    attack = PGDConfig(steps=4, random_start=False)
    whole = perturb(target, x, labels, 0.05, attack, seed=0)
    for number in range(len(x)):
        one = slice(number, number + 1)
        alone = perturb(target, x[one], labels[one], 0.05, attack, seed=0)
        # A gradient within rounding of 0 may have either sign.
        assert ((whole[one] - alone).abs() > 1e-6).float().mean() < 0.01


RANGES = [("pixel", True), ("normalized", True), ("normalized", False)]
ATTACKS = [FGSMConfig(), PGDConfig(), PGDConfig(step_size=3.0)]


# Quick: FGSM in every range, either PGD in one.
@mostly_slow(
    ("attack", "space", "clamp"),
    [(attack, *where) for attack in ATTACKS for where in RANGES],
    keep={0, 1, 2, 3, 8},
)
@mostly_slow("eps", [1 / 255, 0.1, 1.0], keep=(1,))
def test_no_attack_exceeds_eps_or_leaves_the_range(
    attack: FGSMConfig | PGDConfig, eps: float, space: str, clamp: bool
) -> None:
    model = seeded_model(lambda: TinyMoE(BATCH_STATISTICS))
    target = Target(model, mean=MEAN, std=STD, space=space, clamp=clamp)
    images, labels = batch(count=3)
    images[0, :, :4] = 0
    images[1, :, 4:] = 255
    x = target.enter(images)
    with white_box(model):
        found = perturb(target, x, labels, eps, attack, seed=3)
    assert bool(((found.double() - x.double()).abs() <= eps).all())
    bounds = target.bounds(x)
    if bounds is not None:
        assert bool((found >= bounds[0]).all()) and bool((found <= bounds[1]).all())
    assert not found.requires_grad and not torch.equal(found, x)


def test_an_attack_raises_the_loss_and_more_steps_raise_it_more() -> None:
    model = seeded_model(Convolutional)
    target = Target(model, mean=MEAN, std=STD)
    images, labels = batch()
    x = target.enter(images)

    def loss(at: Tensor) -> float:
        return float(functional.cross_entropy(target(at), labels).detach())

    one = loss(perturb(target, x, labels, 0.1, FGSMConfig(), seed=0))
    many = loss(perturb(target, x, labels, 0.1, PGDConfig(steps=40), seed=0))
    assert loss(x) < one < many


def test_the_seed_decides_the_start_and_the_global_stream_is_not_touched() -> None:
    model = seeded_model(Convolutional)
    target = Target(model, mean=MEAN, std=STD)
    images, labels = batch()
    x, attack = target.enter(images), PGDConfig(steps=1)
    state = torch.random.get_rng_state()
    first, again, other = (perturb(target, x, labels, 0.1, attack, seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_weights_get_no_gradient_and_images_are_not_changed() -> None:
    model = seeded_model(Convolutional)
    target = Target(model, mean=MEAN, std=STD)
    images, labels = batch()
    x = target.enter(images)
    before = x.clone()
    with torch.no_grad():  # an evaluation's surroundings
        perturb(target, x, labels, 0.1, PGDConfig(steps=2), seed=0)
    assert torch.equal(x, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_classifier_blind_to_its_input_stays_where_the_start_put_it() -> None:
    class Blind(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1).sum(1, keepdim=True) * torch.zeros(10)

    target = Target(Blind(), mean=MEAN, std=STD)
    images, labels = batch()
    x = target.enter(images)
    assert torch.equal(perturb(target, x, labels, 0.1, FGSMConfig(), seed=0), x)
    start = Ball(x, 0.1, target.bounds(x)).random(torch.Generator().manual_seed(5))
    assert torch.equal(perturb(target, x, labels, 0.1, PGDConfig(), seed=5), start)
