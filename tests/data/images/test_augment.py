"""Training images follow from their bytes, their labels and a seed; each strength does its part."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acmoe.config.images.data import AugmentConfig
from acmoe.data.images.augment import Augment, normalize
from acmoe.data.images.order import Share
from acmoe.data.images.randaugment import OPERATIONS, randaugment
from acmoe.errors import UserError
from vision_cases import random_pixels

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
SWIN = AugmentConfig.preset("swin")
EVERYTHING = replace(SWIN, color_jitter=0.4, shift=2, label_smoothing=0.1)


def images(count: int = 8, side: int = 32) -> torch.Tensor:
    return torch.from_numpy(random_pixels((count, 3, side, side)))


def labels(count: int = 8) -> torch.Tensor:
    return torch.arange(count) % 5


def augment(config: AugmentConfig, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return Augment(config, num_classes=5, mean=MEAN, std=STD)(images(), labels(), seed=seed)


def test_bytes_are_normalised_colour_by_colour() -> None:
    x = normalize(torch.full((1, 3, 2, 2), 51, dtype=torch.uint8), MEAN, STD)
    # 51 / 255 = 0.2
    wanted = torch.tensor([(0.2 - m) / s for m, s in zip(MEAN, STD, strict=True)])
    torch.testing.assert_close(x, wanted.view(1, 3, 1, 1).expand(1, 3, 2, 2))
    torch.testing.assert_close(normalize(torch.full((1, 3, 2, 2), 0.2), MEAN, STD), x)


def test_with_everything_off_only_the_form_changes() -> None:
    x, targets = augment(AugmentConfig())
    assert torch.equal(x, normalize(images(), MEAN, STD))
    assert torch.equal(targets, torch.nn.functional.one_hot(labels(), 5).float())


def test_the_same_seed_gives_the_same_batch_and_another_another() -> None:
    torch.manual_seed(0)
    first = augment(EVERYTHING, seed=4)
    torch.manual_seed(1)  # the global stream has no part in it
    np.random.seed(1)
    again, other = augment(EVERYTHING, seed=4), augment(EVERYTHING, seed=5)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_a_share_of_a_batch_is_augmented_as_in_the_whole_batch() -> None:
    """Mixing aside, whose partners are in the same share, and the noise of erased pixels."""
    config = replace(EVERYTHING, mixup=0.0, cutmix=0.0, erase=0.0)
    whole, _ = augment(config, seed=4)
    for rows in ([0, 2], [1, 3]):
        own, _ = Augment(config, num_classes=5, mean=MEAN, std=STD)(
            images()[rows], labels()[rows], seed=4, share=Share(np.array(rows), len(images()))
        )
        assert torch.equal(own, whole[rows])


def test_the_global_random_streams_are_not_touched() -> None:
    state, numpys = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    augment(EVERYTHING)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == numpys


@given(st.integers(0, 10**6))
def test_targets_are_probabilities_and_images_finite(seed: int) -> None:
    x, targets = augment(EVERYTHING, seed)
    assert x.shape == (8, 3, 32, 32) and x.dtype == torch.float32 and bool(x.isfinite().all())
    torch.testing.assert_close(targets.sum(1), torch.ones(8))
    assert float(targets.min()) >= 0.1 / 5 - 1e-6


@pytest.mark.parametrize(
    "change",
    [
        {"flip": 1.0},
        {"shift": 3},
        {"randaugment": 9.0},
        {"color_jitter": 0.4},
        {"erase": 1.0},
        {"mixup": 0.8},
        {"cutmix": 1.0},
        {"label_smoothing": 0.1},
    ],
)
def test_every_strength_has_an_effect_of_its_own(change: dict[str, float]) -> None:
    x, targets = augment(replace(AugmentConfig(), **change))
    plain_x, plain_targets = augment(AugmentConfig())
    labels_only = "label_smoothing" in change
    assert torch.equal(x, plain_x) == labels_only
    mixes = {"mixup", "cutmix", "label_smoothing"} & set(change)
    assert torch.equal(targets, plain_targets) == (not mixes)


def test_a_certain_flip_mirrors_every_image() -> None:
    x, _ = augment(AugmentConfig(flip=1.0))
    assert torch.equal(x, normalize(images().flip(-1), MEAN, STD))


def test_erased_pixels_are_noise_of_unit_variance() -> None:
    x, _ = augment(AugmentConfig(erase=1.0))
    changed = (x != normalize(images(), MEAN, STD)).all(1)
    shares = changed.float().mean((1, 2))
    assert bool((shares > 0.01).all()) and bool((shares < 0.4).all())
    noise = x.permute(0, 2, 3, 1)[changed]
    assert abs(float(noise.mean())) < 0.1 and abs(float(noise.std()) - 1) < 0.1


def test_mixup_and_cutmix_take_turns_as_often_as_asked() -> None:
    cuts = 0
    for seed in range(200):
        x, _ = augment(AugmentConfig(mixup=0.8, cutmix=1.0, switch=0.3), seed)
        # Mixup keeps only pixels that agree by chance, 1 in 256; cutmix all outside its box.
        cuts += float((x == normalize(images(), MEAN, STD)).float().mean()) > 0.02
    # Binomial(200, 0.3): 60 +- 6.5; a cutmix of the whole image is rare.
    assert 40 < cuts < 80


def test_swins_recipe_is_the_published_one() -> None:
    assert (
        AugmentConfig(
            crop=(0.08, 1.0), flip=0.5, randaugment=9.0, erase=0.25, mixup=0.8, cutmix=1.0
        )
        == SWIN
    )
    assert (SWIN.randaugment_std, SWIN.randaugment_ops, SWIN.switch) == (0.5, 2, 0.5)
    assert AugmentConfig.preset("none") == AugmentConfig()
    with pytest.raises(UserError, match="augment preset 'heavy' is unknown; choose one of none"):
        AugmentConfig.preset("heavy")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"crop": (0.0, 1.0)}, "augment.crop"),
        ({"crop": (0.9, 0.5)}, "augment.crop"),
        ({"ratio": (2.0, 1.0)}, "augment.ratio"),
        ({"flip": 1.5}, "augment.flip=1.5; a probability"),
        ({"erase": -0.1}, "augment.erase"),
        ({"switch": 2.0}, "augment.switch"),
        ({"shift": -1}, "augment.shift"),
        ({"mixup": -1.0}, "augment.mixup"),
        ({"randaugment": 11.0}, "augment.randaugment=11"),
        ({"randaugment_ops": 0}, "augment.randaugment_ops=0"),
        ({"label_smoothing": 1.0}, "augment.label_smoothing"),
    ],
)
def test_strengths_that_make_no_sense_are_refused(
    settings: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        AugmentConfig(**settings)


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"autocontrast", "equalize", "invert"}))
def test_more_strength_is_never_less_distortion(name: str) -> None:
    batch = torch.arange(64 * 64 * 3, dtype=torch.float32).view(1, 64, 64, 3) / 64
    batch = (batch % 256).to(torch.uint8).permute(0, 3, 1, 2).contiguous()
    if name == "sharpness":  # finds nothing to sharpen in a ramp
        batch = 100 + images(1) // 8
    for sign in (-1.0, 1.0):
        apart = []
        for strength in (0.0, 0.3, 0.9):
            found = OPERATIONS[name](batch, np.array([strength]), np.array([sign]))
            assert found.shape == batch.shape and found.dtype == torch.uint8
            apart.append(float((found.float() - batch.float()).abs().mean()))
        assert apart[0] <= apart[1] <= apart[2] and apart[2] > 0
        # Without strength nothing happens; posterize begins at four bits.
        assert apart[0] == 0 or name == "posterize"


def test_operations_are_drawn_evenly_and_applied_half_of_the_time() -> None:
    pixels = torch.from_numpy(random_pixels((600, 3, 16, 16), seed=3))
    found = randaugment(pixels, magnitude=9, std=0.5, ops=1, rng=np.random.default_rng(0))
    changed = float((found != pixels).flatten(1).any(1).float().mean())
    # Autocontrast and equalize change noise of all levels little or not at all: 2 of 15.
    assert 0.38 < changed < 0.56
    assert torch.equal(pixels, torch.from_numpy(random_pixels((600, 3, 16, 16), seed=3)))


def test_an_image_does_not_depend_on_the_others_of_its_batch() -> None:
    # Same draws, other neighbours: the first image must come out the same.
    first = images(4)
    second = first.clone()
    second[1:] = 255 - second[1:]
    left, right = (
        randaugment(batch, magnitude=9, std=0.5, ops=3, rng=np.random.default_rng(7))
        for batch in (first, second)
    )
    assert torch.equal(left[0], right[0])
