"""The main comparison at a size for two CPU cores, on data that need no download.

The data are source text of Python's standard library, and the digits of scikit-learn. Models,
learning rates and augmentation are those of the recipes switch-nano and swin-nano.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from acmoe.config.images.attack import PGDConfig, attack_config
from acmoe.config.images.presets import vision_router
from acmoe.config.images.train import VisionRunConfig, override_vision_run
from acmoe.config.routing import RouterConfig
from acmoe.config.text.train import DataConfig, RunConfig, override_run
from acmoe.lab.study.cell import Cell, ImageTests, TextTests
from acmoe.lab.study.grids.grid import Conditions, Setting, as_recorded, grid_cells
from acmoe.lab.study.grids.images import METRIC
from acmoe.lab.study.grids.text import CONDITIONS
from acmoe.lab.study.materials import Materials, Text
from acmoe.lab.study.size import Size
from acmoe.recipes import recipe
from acmoe.recipes.nano import nano_run

TEXT_SETTING, IMAGE_SETTING = "switch-nano, standard library", "swin-nano, digits"

TEXT_STEPS, IMAGE_STEPS = 300, 240
MEGABYTES = 4.0  # text of the standard library; a twentieth of it is the test text
TEST_TOKENS, VALID_TOKENS = 65_536, 16_384
VALIDATIONS = 6  # points of a validation curve

RADII = (1, 2, 4, 8)  # attack radii, in 255ths of the range of pixels
TEST_BATCH = 133  # half of the 266 images: batch statistics of both halves are as precise
# Six steps cross the whole ball from any random start: 6 x 0.35 is more than two radii.
PGD = PGDConfig(steps=6, step_size=0.35)

IMAGE_CONDITIONS: Conditions = {
    "smoe": "smoe",
    "adaptive-previous": "adaptive",
    "published": as_recorded("reference-swin"),
    "metric": METRIC,
}


def nano_language(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return the cells of the language model."""
    return nano_text_cells("nano", CONDITIONS, materials, size, seeds)


def nano_text_cells(
    study: str,
    conditions: Conditions,
    materials: Materials,
    size: Size,
    seeds: Sequence[int],
    *,
    placement: str = "full",
) -> list[Cell]:
    """Return cells of switch-nano on the standard library's text, with the given routers."""
    text = materials.stdlib(size.megabytes or MEGABYTES)
    setting = Setting(
        study=study,
        name=TEXT_SETTING,
        unit="bytes",
        data=text.fingerprint,
        tests=TextTests(rows=16, tokens=size.tokens or TEST_TOKENS),
    )
    return grid_cells(
        setting,
        conditions,
        seeds,
        lambda router, seed: text_run(router, text, size, seed, placement),
    )


def text_run(
    router: str | RouterConfig, text: Text, size: Size, seed: int, placement: str = "full"
) -> RunConfig:
    """Return a shortened run of the recipe, with the paper's batch statistics."""
    run, steps = nano_run("switch-nano", router), size.steps or TEXT_STEPS
    run = replace(
        run,
        model=replace(run.model, placement=placement),
        data=DataConfig(name=text.name, folder=str(text.folder), limit=text.limit),
        eval_tokens=VALID_TOKENS,
        **_run_fields(run, steps, size, seed),
    )
    return override_run(run, size.overrides)


def nano_images(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return the cells of the image classifier."""
    setting = Setting(
        study="nano",
        name=IMAGE_SETTING,
        unit="images",
        data=materials.digits(),
        tests=image_tests(size),
    )
    return grid_cells(
        setting, IMAGE_CONDITIONS, seeds, lambda router, seed: image_run(router, size, seed)
    )


def image_run(router: str | RouterConfig, size: Size, seed: int) -> VisionRunConfig:
    """Return a run of the recipe, at its own length unless `size` has another."""
    run, steps = recipe("swin-nano"), size.steps or IMAGE_STEPS
    assert isinstance(run, VisionRunConfig)
    run = replace(
        run,
        model=replace(run.model, router=vision_router(router, run.model)),
        eval_batch=TEST_BATCH,
        eval_capacity="model",
        **_run_fields(run, steps, size, seed),
    )
    return override_vision_run(run, size.overrides)


def _run_fields(
    run: RunConfig | VisionRunConfig, steps: int, size: Size, seed: int
) -> dict[str, Any]:
    """Return the fields of a run's config that depend on its length, size and seed."""
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
    """Return FGSM and PGD in pixels with true labels, on all test images or `size.images`."""
    if size.brief:
        return ImageTests(batch=TEST_BATCH)
    radii = tuple(level / 255 for level in RADII)
    # With the experts' capacity of training, as the paper attacks, and all cells so far.
    fgsm, pgd = (
        replace(attack_config(name, eps=radii), capacity="model") for name in ("fgsm", "pgd")
    )
    attacks = (fgsm, replace(pgd, attack=PGD))
    return ImageTests(
        batch=TEST_BATCH,
        attacks=tuple(replace(one, batch=TEST_BATCH, limit=size.images) for one in attacks),
    )
