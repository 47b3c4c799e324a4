"""The attacked classifier: logits alone, nothing random, gradients through the scale."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from acmoe import AdaptiveConfig, SMoEConfig
from acmoe.attacks.attack import perturb
from acmoe.attacks.target import Target, logits_of, loss_gradient, margin, white_box
from acmoe.config.images.attack import AnyAttack, FGSMConfig, PGDConfig
from acmoe.errors import UserError
from vision_cases import BATCH_STATISTICS, Linear, TinyMoE, seeded_model

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)


def batch(seed: int = 0, count: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return images, torch.arange(count) % 10


def test_both_spaces_give_the_logits_of_the_same_image() -> None:
    model = seeded_model(lambda: Linear(10, 8))
    images, _ = batch()
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (MEAN, STD))
    wanted = model((images / 255 - mean) / std)
    for space in ("pixel", "normalized"):
        target = Target(model, mean=MEAN, std=STD, space=space)
        torch.testing.assert_close(target(target.enter(images)), wanted)


def test_the_range_of_images_is_black_to_white_in_either_space() -> None:
    model = seeded_model(lambda: Linear(10, 8))
    images = torch.stack([torch.zeros(3, 8, 8), torch.full((3, 8, 8), 255)]).to(torch.uint8)
    for space in ("pixel", "normalized"):
        target = Target(model, mean=MEAN, std=STD, space=space)
        x = target.enter(images)
        bounds = target.bounds(x)
        assert bounds is not None
        least, greatest = bounds
        assert torch.equal(x[0], least[0].expand(3, 8, 8))
        assert torch.equal(x[1], greatest[0].expand(3, 8, 8))
    assert Target(model, mean=MEAN, std=STD, clamp=False).bounds(x) is None
    with pytest.raises(UserError, match=r"images are torch\.float32; give bytes"):
        target.enter(images.float())


def test_the_margin_is_negative_where_the_label_has_lost() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.5], [4.0, -1.0, 0.0]])
    # 3 - 2.5 = 0.5; 0 - 4 = -4
    assert margin(logits, torch.tensor([1, 2])).tolist() == [0.5, -4.0]


def test_the_gradient_of_a_linear_classifier_is_the_known_one() -> None:
    model = seeded_model(lambda: Linear(10, 8))
    images, labels = batch()
    target = Target(model, mean=MEAN, std=STD)
    x = target.enter(images)
    gradient = loss_gradient(target, x, labels)
    # d CE / d x = W^T (softmax - one hot) / std, for each image alone.
    weight = model.head.weight.view(10, 3, 8, 8)
    for number in range(len(x)):
        share = target(x)[number].softmax(0)
        share[labels[number]] -= 1
        wanted = sum(share[k] * weight[k] for k in range(10)) / torch.tensor(STD).view(3, 1, 1)
        torch.testing.assert_close(gradient[number], wanted, atol=1e-6, rtol=1e-4)


def test_a_balance_loss_is_not_attacked() -> None:
    # The same weights with no balance loss and with one that would drown everything else.
    images, labels = batch()
    gradients = []
    for balance in (0.0, 1e6):
        model = seeded_model(lambda: TinyMoE(BATCH_STATISTICS, balance=balance))  # noqa: B023
        target = Target(model, mean=MEAN, std=STD)
        with white_box(model):
            gradients.append(loss_gradient(target, target.enter(images), labels))
    assert torch.equal(*gradients)


def test_gate_noise_is_off_and_every_module_gets_its_mode_back() -> None:
    model = seeded_model(lambda: TinyMoE(SMoEConfig(noise=1.0)))
    model.train()
    model.norms[0].eval()  # somebody froze one
    modes = [module.training for module in model.modules()]
    images, _ = batch()
    target = Target(model, mean=MEAN, std=STD)
    x = target.enter(images)
    assert not torch.equal(target(x), target(x))
    with white_box(model):
        assert torch.equal(target(x), target(x))
    with pytest.raises(RuntimeError, match="stop"), white_box(model):
        raise RuntimeError("stop")
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("statistics_of", ["previous", "current"])
def test_the_gradient_goes_through_the_scale(statistics_of: str) -> None:
    # Directional derivatives by central differences in float64; routing does not flip within 1e-6.
    config = AdaptiveConfig(statistics="batch", statistics_of=statistics_of)
    model = seeded_model(lambda: TinyMoE(config)).double().eval()
    images, labels = batch(count=4)
    target = Target(model, mean=MEAN, std=STD)
    x = target.enter(images).double()

    def loss(at: Tensor) -> float:
        return functional.cross_entropy(target(at), labels, reduction="sum").item()

    with white_box(model):
        through = loss_gradient(target, x, labels)
    detached = loss_gradient(target, x, labels)
    for seed in range(3):
        v = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
        slope = (loss(x + 1e-6 * v) - loss(x - 1e-6 * v)) / 2e-6
        assert math.isclose(float((through * v).sum()), slope, rel_tol=1e-5, abs_tol=1e-6)
        assert not math.isclose(float((detached * v).sum()), slope, rel_tol=1e-5, abs_tol=1e-6)
    assert all(layer.router.config.detach for layer in model.layers)


def test_an_answer_without_logits_or_with_nan_is_refused() -> None:
    with pytest.raises(UserError, match="the model answers with dict and no logits"):
        logits_of({"loss": 1})
    with pytest.raises(UserError, match="logits are not all finite"):
        logits_of(torch.tensor([[math.nan, 1.0]]))


@pytest.mark.parametrize("attack", [FGSMConfig(), PGDConfig(steps=2)])
def test_a_gradient_that_is_no_number_is_refused(attack: AnyAttack) -> None:
    class Cusp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            # sqrt at 0 has an infinite slope, times 0: NaN.
            return (x.flatten(1)[:, :2] * 0).sqrt()

    target = Target(Cusp(), mean=(0.0,) * 3, std=(1.0,) * 3)
    with pytest.raises(UserError, match="gradient with respect to an image is not finite"):
        perturb(target, torch.rand(2, 3, 4, 4), torch.tensor([0, 1]), 0.1, attack, seed=0)


def test_a_gradient_in_bf16_points_where_that_in_fp32_does_and_scores_stay_in_fp32() -> None:
    model = seeded_model(lambda: TinyMoE(BATCH_STATISTICS))
    images, labels = batch(count=16)
    fine, coarse = (
        Target(model, mean=MEAN, std=STD, precision=precision) for precision in ("fp32", "bf16")
    )
    x = fine.enter(images)
    with white_box(model):
        exact, rounded = (loss_gradient(target, x, labels) for target in (fine, coarse))
        assert torch.equal(fine(x), coarse(x))
    assert rounded.dtype == torch.float32 and not torch.equal(exact, rounded)
    # bf16 keeps 8 bits, and a token near the border may change its expert: not more than that.
    assert functional.cosine_similarity(exact.flatten(), rounded.flatten(), dim=0) > 0.95
