"""`acmoe train RECIPE [KEY=VALUE ...]`: train a recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a recipe. A repeated command continues the run where it stopped."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")] = ""
    """Name of the recipe; `acmoe train --list` shows them all."""
    overrides: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")
    ] = ()
    """Settings to change, such as steps=200 lr=1e-3 model.router=adaptive."""
    out: Path | None = None
    """Folder of the run, which holds everything it writes; runs/RECIPE if not given."""
    list: bool = False
    """List the recipes and stop."""
    keys: bool = False
    """List the recipe's settings that can be overridden, with their values, and stop."""

    def run(self) -> int:
        from acmoe.errors import check
        from acmoe.recipes import recipe

        if self.list:
            return _list_recipes()
        check(bool(self.recipe), "no recipe given; `acmoe train --list` shows them all")
        config = recipe(self.recipe)
        if self.keys:
            return _list_keys(config)
        return run_recipe(config, self.overrides, self.out or Path("runs") / self.recipe)


def run_recipe(config: object, overrides: tuple[str, ...], folder: Path) -> int:
    from acmoe.config.images.train import VisionRunConfig, override_vision_run
    from acmoe.config.text.train import RunConfig, override_run

    console = Console(stderr=True)
    if isinstance(config, VisionRunConfig):
        from acmoe.train.run import train_images

        summary = train_images(override_vision_run(config, overrides), folder, console=console)
    else:
        from acmoe.train.run import train

        assert isinstance(config, RunConfig)
        summary = train(override_run(config, overrides), folder, console=console)
    if summary.rank == 0:
        print(summary.message)
    return 0 if summary.signal is None else 128 + summary.signal


def _list_recipes() -> int:
    from acmoe.recipes import recipes

    table = Table("recipe", "what")
    for name, found in recipes().items():
        table.add_row(name, found.description)
    Console().print(table)
    return 0


def _list_keys(config: object) -> int:
    from functools import reduce

    from acmoe.config.overrides import keys

    for key in keys(config):
        print(f"{key}={reduce(getattr, key.split('.'), config)}")
    return 0
