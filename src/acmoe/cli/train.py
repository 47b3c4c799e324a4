"""`acmoe train RECIPE [KEY=VALUE ...]`: train a recipe."""

from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Column, Table

from acmoe.cli.arguments.shared import TrainThreads
from acmoe.cli.arguments.unread import check_read

if TYPE_CHECKING:
    from acmoe.config.images.train import VisionRunConfig
    from acmoe.config.text.train import RunConfig

TABLE_WIDTH = 70  # characters of a line: the longest name of a recipe takes 34


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a recipe. A repeated command continues the run where it stopped."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[RECIPE]")] = ""
    """Name of the recipe; `acmoe train --list` shows them all."""
    overrides: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[KEY=VALUE ...]")
    ] = ()
    """Settings to change, such as steps=200 lr=1e-3 model.router=adaptive."""
    out: Path | None = None
    """Folder of the run, which holds everything it writes; runs/RECIPE if not given."""
    threads: TrainThreads = None
    list: bool = False
    """List the recipes and stop."""
    keys: bool = False
    """List the recipe's settings that can be overridden, with their values, and stop. Settings
    given beside it are applied."""

    def run(self) -> int:
        from acmoe.errors import check
        from acmoe.recipes import recipe

        if self.list:
            given = " ".join((self.recipe, *self.overrides)).strip()
            check(not given, f"{given!r} has no effect with --list; leave it out")
            check_read(self, ("list",), "with --list")
            return _list_recipes()
        check(bool(self.recipe), "no recipe given; `acmoe train --list` shows them all")
        config = recipe(self.recipe)
        if self.keys:
            check_read(self, ("recipe", "overrides", "keys"), "with --keys")
            return _list_keys(overridden(config, self.overrides))
        folder = self.out or Path("runs") / self.recipe
        return run_recipe(config, self.overrides, folder, threads=self.threads)


def run_recipe(
    config: object, overrides: tuple[str, ...], folder: Path, *, threads: int | None = None
) -> int:
    from acmoe.config.images.train import VisionRunConfig

    console = Console(stderr=True)
    run = overridden(config, overrides)
    note = _set_threads(threads, run, folder)
    if isinstance(run, VisionRunConfig):
        from acmoe.train.run import train_images

        summary = train_images(run, folder, console=console, note=note)
    else:
        from acmoe.train.run import train

        summary = train(run, folder, console=console, note=note)
    if summary.rank == 0:
        print(summary.message)
    return 0 if summary.signal is None else 128 + summary.signal


def overridden(config: object, overrides: tuple[str, ...]) -> "RunConfig | VisionRunConfig":
    """Return the config of a run with these settings changed."""
    from acmoe.config.images.train import VisionRunConfig, override_vision_run
    from acmoe.config.text.train import RunConfig, override_run

    if isinstance(config, VisionRunConfig):
        return override_vision_run(config, overrides)
    assert isinstance(config, RunConfig)
    return override_run(config, overrides)


def _set_threads(requested: int | None, config: "RunConfig | VisionRunConfig", folder: Path) -> str:
    """Choose the number of threads for a run, and return a line that says it."""
    from acmoe.train.threads import choose_threads, use_threads

    threads = choose_threads(requested, config.model, device=config.device, run=folder)
    use_threads(threads)
    return threads.message


def _list_recipes() -> int:
    from acmoe.recipes import recipes

    console = Console()
    if console.width < TABLE_WIDTH:
        for name, found in recipes().items():
            text = f"{name}: {found.description}"
            print(fill(text, console.width, subsequent_indent="    ", break_on_hyphens=False))
        return 0
    table = Table(Column("recipe", no_wrap=True), "what")
    for name, found in recipes().items():
        table.add_row(name, found.description)
    console.print(table)
    return 0


def _list_keys(config: object) -> int:
    from functools import reduce

    from acmoe.config.overrides import keys

    for key in keys(config):
        print(f"{key}={reduce(getattr, key.split('.'), config)}")
    return 0
