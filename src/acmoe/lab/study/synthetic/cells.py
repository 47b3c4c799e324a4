"""Make the cells of the synthetic study from its grid, and run one of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from acmoe.config.overrides import override
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.cells.outcome import Notify, Outcome
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.size import Size
from acmoe.lab.study.synthetic.grid import synthetic_grid
from acmoe.lab.study.synthetic.run import run_synthetic
from acmoe.lab.study.synthetic.task import SyntheticConfig

SYNTHETIC_CONDITIONS = tuple(
    dict.fromkeys(condition for condition, _, _ in synthetic_grid(seeds=(0,)))
)


def synthetic_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return the cells; all tokens are random, so no data set is needed."""
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


def run_synthetic_cell(cell: Cell, folder: Path, notify: Notify) -> Outcome:
    """Train on the CPU, which is faster than a GPU for models of a few thousand weights."""
    found = run_synthetic(cast(SyntheticConfig, cell.config))
    steps = [int(step) for step in found["curves"]["step"]]
    curves = {
        name: list(zip(steps, values, strict=True))
        for name, values in found["curves"].items()
        if name != "step"
    }
    return Outcome(metrics=found["metrics"], curves=curves)
