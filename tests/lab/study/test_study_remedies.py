"""Every remedy of the nano size trains and is scored, without a data folder."""

from pathlib import Path

import pytest

from acmoe.config.routing import AdaptiveConfig
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.size import Size
from acmoe.lab.study.variant_grids import REMEDIES
from acmoe.lab.study.worker import run_cell

SMALL = (
    *("model.dim=16", "model.hidden=16", "model.heads=2", "model.block=16", "model.span=16"),
    *("eval_tokens=100", "log_every=1"),
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remedies")


def nano_cells(work: Path, steps: int):
    size = Size(steps=steps, batch=2, tokens=100, megabytes=0.01, overrides=SMALL, device="cpu")
    materials = Materials(data=Path("nowhere"), work=work)
    return STUDIES["remedies"].cells(materials, size, (0,), asked=("nano",))


def test_every_remedy_has_a_finite_figure_at_the_nano_size(work: Path) -> None:
    cells = nano_cells(work, steps=2)
    assert [cell.condition for cell in cells] == list(REMEDIES)
    for cell in cells:
        metrics = run_cell(cell, work, lambda text: None)["metrics"]
        assert 1 < metrics["test"] < 20
        if REMEDIES[cell.condition].router is not None:
            assert metrics["scale_rms_log"] > 0  # of a learned lambda, too


def test_a_strength_that_falls_reaches_its_end_with_the_run(work: Path) -> None:
    routers = {cell.condition: cell.config.model.router for cell in nano_cells(work, steps=7)}
    falling = routers["strength-falling"]
    assert isinstance(falling, AdaptiveConfig)
    assert (falling.strength, falling.strength_end, falling.strength_steps) == (100.0, 1.0, 7)
    fixed = routers["strength-10"]
    assert (fixed.strength, fixed.strength_end) == (10.0, None)


def test_plain_descent_of_the_router_is_asked_for_in_the_run(work: Path) -> None:
    for cell in nano_cells(work, steps=2):
        wanted = "sgd" if cell.condition.endswith("-sgd") else "adam"
        assert cell.config.router_optimizer == wanted
