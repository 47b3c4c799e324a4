"""Every recipe of an image classifier builds, and says what the paper says."""

from dataclasses import replace

import pytest
import torch

from acmoe.config.images.data import AugmentConfig
from acmoe.config.images.presets import SOFT_VIT_MODELS, SWIN_MODELS
from acmoe.config.images.train import VisionRunConfig
from acmoe.config.images.vision import SwinConfig
from acmoe.config.routing import AdaptiveConfig, RandomConfig
from acmoe.models.count import count_parameters
from acmoe.models.registry import build_model
from acmoe.recipes import recipe, recipes
from acmoe.routing.layer_plan import adaptive_depths
from slow_cases import mostly_slow

# Clean top-1 of the paper's tables: Swin, Swin-base, SoftMoE, dispersion, placement, random.
REPORTED = {
    "swin-small-top1": "75.22",
    "swin-small-top1-acmoe": "75.39",
    "swin-small": "76.10",
    "swin-small-acmoe": "76.31",
    "swin-base": "79.06",
    "swin-base-acmoe": "79.25",
    "softmoe-tiny": "72.86",
    "softmoe-tiny-acmoe": "73.21",
    "swin-small-top1-acmoe-variance": "75.06",
    "swin-small-acmoe-variance": "76.11",
    "swin-small-top1-acmoe-back-half": "75.16",
    "swin-small-top1-acmoe-skip-2": "75.34",
    "swin-small-top1-acmoe-skip-1": "75.35",
    "swin-small-acmoe-back-half": "76.16",
    "swin-small-acmoe-skip-2": "76.10",
    "swin-small-acmoe-skip-1": "76.29",
    "swin-small-random": "74.22",
}
PLAIN = (
    *("swin-small-top1", "swin-small", "swin-base", "softmoe-tiny"),
    *("swin-imagenette", "softmoe-imagenette", "swin-nano", "softmoe-nano"),
)
OURS_ALONE = {name + end for name in PLAIN[4:] for end in ("", "-acmoe")}
VISION = {
    name: found for name, found in recipes().items() if isinstance(found.build(), VisionRunConfig)
}


def run_of(name: str) -> VisionRunConfig:
    run = recipe(name)
    assert isinstance(run, VisionRunConfig)
    return run


# Measures and placements in one backbone; tests/models/test_swin.py builds each in a small one.
VARIANTS = ("-variance", "-back-half", "-skip-1", "-skip-2")


@mostly_slow(
    "name", VISION, keep=[place for place, name in enumerate(VISION) if not name.endswith(VARIANTS)]
)
def test_a_vision_recipe_builds_its_model(name: str) -> None:
    run = run_of(name)
    with torch.device("meta"):
        model = build_model(run.model)
    sizes = {"swin-small": 280_083_208, "swin-base": 497_294_696, "softmoe-tiny": 231_319_342}
    for start, parameters in sizes.items():
        if name.startswith(start):
            assert count_parameters(model).total == parameters
    assert count_parameters(model).total > 100_000


def test_every_row_of_the_papers_vision_tables_is_a_recipe_with_its_figure() -> None:
    assert set(VISION) == set(REPORTED) | OURS_ALONE
    for name, figure in REPORTED.items():
        assert f"(paper: {figure} top-1" in VISION[name].description, name


def test_every_vision_model_is_a_recipe_of_its_plain_router() -> None:
    for name, card in {**SWIN_MODELS, **SOFT_VIT_MODELS}.items():
        assert run_of(name).model == card.config, name


@pytest.mark.parametrize("name", PLAIN)
def test_acmoe_in_images_differs_from_its_baseline_in_the_router_alone(name: str) -> None:
    plain, adaptive = run_of(name), run_of(f"{name}-acmoe")
    router = adaptive.model.router
    assert isinstance(router, AdaptiveConfig)
    assert router.base == plain.model.router
    # Statistics of the batch in training, of all batches so far in evaluation.
    assert (router.modes, router.measure) == (("batch", "running"), "mad")
    assert router.mix == (8 if name.startswith("softmoe") else 1)
    assert replace(adaptive, model=replace(adaptive.model, router=router.base)) == plain


def test_swin_is_trained_as_the_paper_says() -> None:
    for name in ("swin-small-top1", "swin-small", "swin-base"):
        run = run_of(name)
        assert (run.lr, run.min_lr, run.weight_decay) == (1.25e-4, 1.25e-7, 0.1)
        assert (run.epochs, run.schedule) == (60, "cosine")
        # 128 images on each of four GPUs; ImageNet's 1,281,167 make 2,502 updates an epoch.
        assert run.batch // run.split == 128
        assert run.updates(1_281_167 // run.batch) == 60 * 2_502
        assert isinstance(run.model, SwinConfig)
        assert (run.model.balance, run.model.num_experts, run.data.size) == (0.1, 16, 224)
        assert run.model.top_k == (1 if name.endswith("top1") else 2)
        assert run.augment == AugmentConfig.preset("swin")
        # Smoothed once, in the loss.
        assert (run.model.label_smoothing, run.augment.label_smoothing) == (0.1, 0.0)


def test_softmoe_is_trained_as_deit_is() -> None:
    run = run_of("softmoe-tiny")
    assert (run.epochs, run.warmup, run.batch, run.lr) == (300, 5, 1024, 5e-4 * 1024 / 512)
    assert (run.min_lr, run.weight_decay, run.clip) == (1e-5, 0.05, None)
    assert (run.ema, run.augment.repeats) == (0.99996, 3)
    assert replace(run.augment, repeats=1) == AugmentConfig.preset("swin")
    for name in (*REPORTED, *OURS_ALONE):
        if not name.startswith("softmoe-tiny"):
            assert (run_of(name).ema, run_of(name).augment.repeats) == (None, 1), name


@pytest.mark.parametrize("base", ["swin-small", "swin-small-top1"])
def test_vision_ablations_change_the_one_thing_they_are_named_after(base: str) -> None:
    headline = run_of(f"{base}-acmoe")
    model, router = headline.model, headline.model.router
    assert isinstance(router, AdaptiveConfig)
    changed = replace(model, router=replace(router, measure="variance"))
    assert run_of(f"{base}-acmoe-variance") == replace(headline, model=changed)
    # The stage's 9 MoE layers are the paper's layers 2, 4 ... 18; depths count from 0.
    expected = {"back-half": 5, "skip-2": 6, "skip-1": 7}
    for placement, count in expected.items():
        run = run_of(f"{base}-acmoe-{placement}")
        assert run == replace(headline, model=replace(model, placement=placement))
        assert adaptive_depths(placement, 9) == tuple(range(9 - count, 9))


def test_the_random_ablation_is_of_the_model_with_two_experts() -> None:
    headline = run_of("swin-small")
    expected = RandomConfig(base=headline.model.router, std=0.5)
    random = replace(headline, model=replace(headline.model, router=expected))
    assert run_of("swin-small-random") == random
