"""Every ablation of the nano size trains and is scored, without a data folder."""

import math
from pathlib import Path

import pytest

from acmoe.lab.study.grids.ablations import ROUTERS, placements
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.summary import summarise
from acmoe.lab.study.results.tables import study_markdown
from acmoe.lab.study.size import Size
from acmoe.lab.study.worker import run_cell

pytestmark = pytest.mark.slow  # the grid itself is tested in test_study_grids.py

ABLATIONS = STUDIES["ablations"]
SMALL = (
    *("model.dim=16", "model.hidden=16", "model.heads=2", "model.block=16", "model.span=16"),
    *("eval_tokens=100", "log_every=1"),
)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    work = tmp_path_factory.mktemp("ablations")
    size = Size(steps=2, batch=2, tokens=100, megabytes=0.01, overrides=SMALL, device="cpu")
    materials = Materials(data=Path("nowhere"), work=work)
    cells = ABLATIONS.cells(materials, size, (0,), settings=("nano",))
    surroundings = {"environment": {"commit": "abc1234"}, "options": size.text}
    return [run_cell(cell, work, lambda text: None) | surroundings for cell in cells]


def test_every_choice_has_a_finite_figure_and_an_m_where_it_is_adaptive(records):
    found = {record["condition"]: record["metrics"] for record in records}
    assert set(found) == {*ROUTERS, *placements(4)}
    assert all(1 < metrics["test"] < 20 for metrics in found.values())
    assert all(math.isfinite(metrics["contaminated"]) for metrics in found.values())
    without = {name for name, metrics in found.items() if "scale_rms_log" not in metrics}
    assert without == {"smoe", "random", "threshold", "threshold-learned"}
    layers = {record["condition"]: len(record["details"]["scale"]) for record in records}
    assert [layers[name] for name in ("adaptive", "skip-1", "skip-2", "alternating")] == [
        3,
        2,
        1,
        2,
    ]


def test_the_page_gives_the_command_that_needs_no_data(records):
    page = study_markdown(summarise(ABLATIONS, records), [])
    words = f'{" ".join(SMALL)} --settings "switch-nano, standard library" --seeds 0'
    assert f"`acmoe study ablations {words}" in page
    assert "--data" not in page
    assert "| variance | adaptive | 1 |" in page
    assert "| threshold-learned-adaptive | threshold-learned | 1 |" in page
