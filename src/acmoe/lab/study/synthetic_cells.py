"""The synthetic grid as cells of a study."""

from collections.abc import Sequence
from dataclasses import replace

from acmoe.config.overrides import override
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.size import Size
from acmoe.lab.study.synthetic import synthetic_grid

SYNTHETIC_CONDITIONS = tuple(
    dict.fromkeys(condition for condition, _, _ in synthetic_grid(seeds=(0,)))
)


def synthetic_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Needs no data: every token is drawn."""
    cells = []
    for condition, factors, config in synthetic_grid(seeds=seeds):
        if size.steps is not None:
            config = replace(config, steps=size.steps)
        config = override(config, size.overrides)
        cells.append(
            Cell(
                study="synthetic",
                setting=", ".join(f"{name} {value}" for name, value in factors.items()),
                condition=condition,
                factors=factors,
                seed=config.seed,
                size=f"{config.steps:,} steps of {config.batch} tokens",
                data="drawn",
                config=config,
            )
        )
    return cells
