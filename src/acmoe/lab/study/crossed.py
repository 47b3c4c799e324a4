"""Every condition with every seed: the cells of one setting."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

from acmoe.config.images.train import VisionRunConfig
from acmoe.config.routing import RouterConfig
from acmoe.config.text.train import RunConfig
from acmoe.lab.study.cell import Cell, ImageTests, TextTests

Conditions = Mapping[str, str | RouterConfig]  # by name
Run = Callable[[str | RouterConfig, int], RunConfig | VisionRunConfig]  # of a router and a seed


def crossed(
    study: str,
    setting: str,
    conditions: Conditions,
    seeds: Sequence[int],
    run: Run,
    *,
    unit: str,
    data: str,
    tests: TextTests | ImageTests,
    factors: Mapping[str, str | int | float] | None = None,
) -> list[Cell]:
    """unit: of what an update reads, such as tokens; data: the fingerprint of all of it."""
    cells = []
    for seed, (condition, router) in product(seeds, conditions.items()):
        config = run(router, seed)
        rows = config.tokens_per_step if isinstance(config, RunConfig) else config.batch
        cells.append(
            Cell(
                study=study,
                setting=setting,
                condition=condition,
                factors=factors or {},
                seed=seed,
                size=f"{config.steps:,} steps of {rows:,} {unit}",
                data=data,
                config=config,
                tests=tests,
            )
        )
    return cells
