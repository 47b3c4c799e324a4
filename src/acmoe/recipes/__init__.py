"""Experiments by name: each recipe is a function that returns the config of a run.

    acmoe train switch-medium-acmoe steps=20000 data.folder=/my/wikitext103

The docstring of a recipe states the paper's figure, ours if it was measured, the hardware and the
hours. The name of a model is also a recipe: of its plain (SMoE) baseline, or, if it ends in
"-published", of the model of the published code.
"""

from collections.abc import Callable
from typing import NamedTuple

from acmoe.config.images.train import VisionRunConfig
from acmoe.config.text.train import RunConfig
from acmoe.errors import check, suggest
from acmoe.recipes import ablations, language, nano, vision, vision_small

AnyRunConfig = RunConfig | VisionRunConfig


class Recipe(NamedTuple):
    build: Callable[[], AnyRunConfig]
    description: str  # one line


def recipes() -> dict[str, Recipe]:
    """Map the name of every recipe to the recipe, in the order of the paper's tables."""
    found = {}
    builders: dict[str, Callable[[], AnyRunConfig]] = {
        **language.RECIPES,
        **ablations.RECIPES,
        **vision.RECIPES,
        **nano.RECIPES,
        **vision_small.RECIPES,
    }
    for name, build in builders.items():
        first, _, _ = (build.__doc__ or "").partition("\n")
        found[name] = Recipe(build, first.strip())
    return found


def recipe(name: str) -> AnyRunConfig:
    """Return the config of the recipe of that name.

    >>> recipe("switch-medium-acmoe").model.router.name
    'adaptive'
    """
    known = recipes()
    check(name in known, f"recipe {name!r} is unknown; {suggest(name, known)}")
    return known[name].build()
