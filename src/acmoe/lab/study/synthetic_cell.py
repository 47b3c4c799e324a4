"""A cell of the synthetic study."""

from pathlib import Path
from typing import cast

from acmoe.lab.study.cell import Cell
from acmoe.lab.study.outcome import News, Outcome
from acmoe.lab.study.synthetic import SyntheticConfig, run_synthetic


def run_synthetic_cell(cell: Cell, folder: Path, news: News) -> Outcome:
    """Models of a few thousand weights: a CPU is faster than a GPU."""
    found = run_synthetic(cast(SyntheticConfig, cell.config))
    steps = [int(step) for step in found["curves"]["step"]]
    curves = {
        name: list(zip(steps, values, strict=True))
        for name, values in found["curves"].items()
        if name != "step"
    }
    return Outcome(metrics=found["metrics"], curves=curves)
