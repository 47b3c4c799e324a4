"""The comparison at a size that two CPU cores finish, on data that need no download.

Bytes of Python's standard library, and the digits that come with scikit-learn. Models, rates and
augmentation are those of the recipes switch-nano and swin-nano.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from acmoe.config.images.attack import PGDConfig, attack_config
from acmoe.config.images.presets import vision_router
from acmoe.config.images.train import VisionRunConfig, override_vision_run
from acmoe.config.routing import AdaptiveConfig, RouterConfig
from acmoe.config.text.train import DataConfig, RunConfig, override_run
from acmoe.lab.study.cell import Cell, ImageTests, TextTests
from acmoe.lab.study.crossed import Conditions, crossed
from acmoe.lab.study.image_grid import METRIC
from acmoe.lab.study.materials import Materials, Text
from acmoe.lab.study.size import Size
from acmoe.lab.study.text_grids import CONDITIONS
from acmoe.recipes import recipe
from acmoe.recipes.nano import nano_run

TEXT_SETTING, IMAGE_SETTING = "switch-nano, standard library", "swin-nano, digits"

TEXT_STEPS, IMAGE_STEPS = 300, 240
MEGABYTES = 4.0  # of the standard library; a twentieth is the test text
TEST_TOKENS, VALID_TOKENS = 65_536, 16_384
VALIDATIONS = 6  # points of a curve

RADII = (1, 2, 4, 8)  # of the attacks, in 255ths of the range of pixels
TEST_BATCH = 133  # images: half of the 266, so that statistics of both batches are as sure
# Six steps cross the ball from any random start: 6 x 0.35 exceeds its two radii.
PGD = PGDConfig(steps=6, step_size=0.35)

IMAGE_CONDITIONS: Conditions = {
    "smoe": "smoe",
    "adaptive-previous": "adaptive",
    "published": AdaptiveConfig.preset("reference-swin"),
    "metric": METRIC,
}


def nano_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """A language model, clean and contaminated, and an image classifier, clean and attacked."""
    text = nano_text_cells("nano", CONDITIONS, materials, size, seeds)
    return [*text, *_image_cells(materials, size, seeds)]


def nano_text_cells(
    study: str,
    conditions: Conditions,
    materials: Materials,
    size: Size,
    seeds: Sequence[int],
    *,
    placement: str = "full",
) -> list[Cell]:
    """Routers of switch-nano on the standard library's text."""
    text = materials.stdlib(size.megabytes or MEGABYTES)
    tests = TextTests(rows=16, tokens=size.tokens or TEST_TOKENS)
    return crossed(
        study,
        TEXT_SETTING,
        conditions,
        seeds,
        lambda router, seed: text_run(router, text, size, seed, placement),
        unit="bytes",
        data=text.fingerprint,
        tests=tests,
    )


def text_run(
    router: str | RouterConfig, text: Text, size: Size, seed: int, placement: str = "full"
) -> RunConfig:
    """The recipe, shortened; batch statistics where the paper has them."""
    run, steps = nano_run("switch-nano", router), size.steps or TEXT_STEPS
    run = replace(
        run,
        model=replace(run.model, placement=placement),
        data=DataConfig(name=text.name, folder=str(text.folder), limit=text.limit),
        eval_tokens=VALID_TOKENS,
        **_pace(run, steps, size, seed),
    )
    return override_run(run, size.overrides)


def _image_cells(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    return crossed(
        "nano",
        IMAGE_SETTING,
        IMAGE_CONDITIONS,
        seeds,
        lambda router, seed: image_run(router, size, seed),
        unit="images",
        data=materials.digits(),
        tests=image_tests(size),
    )


def image_run(router: str | RouterConfig, size: Size, seed: int) -> VisionRunConfig:
    """The recipe at its own length."""
    run, steps = recipe("swin-nano"), size.steps or IMAGE_STEPS
    assert isinstance(run, VisionRunConfig)
    run = replace(
        run,
        model=replace(run.model, router=vision_router(router, run.model)),
        eval_batch=TEST_BATCH,
        **_pace(run, steps, size, seed),
    )
    return override_vision_run(run, size.overrides)


def _pace(run: RunConfig | VisionRunConfig, steps: int, size: Size, seed: int) -> dict[str, Any]:
    """What a length asks of either kind of run."""
    return {
        "steps": steps,
        "warmup": steps // 10,
        "batch": size.batch or run.batch,
        "eval_every": max(1, steps // VALIDATIONS),
        "checkpoint_every": steps,
        "seed": seed,
        "device": size.device,
    }


def image_tests(size: Size) -> ImageTests:
    """All test images, unless fewer are asked for, as a careful adversary would attack them."""
    if size.brief:
        return ImageTests(batch=TEST_BATCH)
    radii = tuple(level / 255 for level in RADII)
    fgsm, pgd = (attack_config(name, eps=radii) for name in ("fgsm", "pgd"))
    attacks = (fgsm, replace(pgd, attack=PGD))
    return ImageTests(
        batch=TEST_BATCH,
        attacks=tuple(replace(one, batch=TEST_BATCH, limit=size.images) for one in attacks),
    )
