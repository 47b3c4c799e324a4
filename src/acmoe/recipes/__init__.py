"""Experiments by name: each recipe is a function that returns a whole config.

    acmoe train switch-medium-acmoe steps=20000 data.folder=/my/wikitext103

A recipe's docstring states the paper's figure, ours where it was measured, hardware and hours.
A model's name is the recipe of its plain (SMoE) baseline.
"""

import difflib
from collections.abc import Callable
from typing import NamedTuple

from acmoe.config.images.train import VisionRunConfig
from acmoe.config.text.train import RunConfig
from acmoe.errors import check
from acmoe.recipes import ablations, language, nano, vision, vision_small

AnyRunConfig = RunConfig | VisionRunConfig


class Recipe(NamedTuple):
    build: Callable[[], AnyRunConfig]
    description: str  # one line


def recipes() -> dict[str, Recipe]:
    """Every recipe, in the order of the paper's tables."""
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
    """The config of the recipe of that name.

    >>> recipe("switch-medium-acmoe").model.router.name
    'adaptive'
    """
    known = recipes()
    near = difflib.get_close_matches(name, known, n=3)
    meant = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}"
    check(name in known, f"recipe {name!r} is unknown; {meant}")
    return known[name].build()
