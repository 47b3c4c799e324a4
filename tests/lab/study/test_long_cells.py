"""Every declared cell of the long studies trains and is scored, with a small model."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_study_grids import NOWHERE

from acmoe.lab.study.materials import Materials
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.size import Size
from acmoe.lab.study.worker import run_cell
from study_cases import data_folder

SMALL = (
    *("precision=fp32", "compile=false", "graph=false", "eval_tokens=200", "eval_batch=2"),
    *("model.dim=32", "model.heads=8", "model.hidden=16", "model.span=24", "model.block=16"),
)
SIZE = Size(
    steps=2,
    batch=2,
    tokens=300,
    overrides=SMALL,
    device="cpu",
)
SIZES = {
    "long": replace(SIZE, megabytes=0.01),
    "long-words": replace(SIZE, parts=1, vocabulary=50),
}
CELLS = [
    (study, cell.setting, cell.condition)
    for study, part in (("long", ("enwik8",)), ("long-words", ()))
    for cell in STUDIES[study].cells(NOWHERE, Size(), (0,), part)
]
FAST = ("long", "switch-enwik8, published", "published")


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    folder = tmp_path_factory.mktemp("long")
    data = data_folder(folder / "data")
    lines = "\n".join(f"the {name} is {n} , not {n + 1} ." for n, name in enumerate("abcd" * 60))
    for name, file in (
        *(("enwiki15-words", f"{split}.txt") for split in ("train_00", "valid", "test")),
        ("wikitext103", "wiki.valid.tokens"),
    ):
        (data / name).mkdir(exist_ok=True)
        (data / name / file).write_text(lines + "\n")
    return Materials(data=data, work=folder / "work")


@pytest.mark.parametrize(
    "study, setting, condition",
    [pytest.param(*one, marks=() if one == FAST else pytest.mark.slow) for one in CELLS],
)
def test_a_declared_cell_trains_and_is_scored(
    study: str, setting: str, condition: str, materials: Materials, tmp_path: Path
) -> None:
    part = ("enwik8",) if study == "long" else ()
    (cell,) = (
        cell
        for cell in STUDIES[study].cells(materials, SIZES[study], (0,), part)
        if (cell.setting, cell.condition) == (setting, condition)
    )
    found = run_cell(cell, tmp_path, lambda line: None)
    metrics = found["metrics"]
    assert found["status"] == "done"
    compared = {metric.key for metric in STUDIES[study].compared}
    assert compared <= metrics.keys()
    assert metrics["tokens_trained"] == 2 * 2 * 16
    adaptive = condition not in ("smoe", "published-control")
    assert ("scale_rms_log" in metrics) == ("test_running" in metrics) == adaptive
    if adaptive:  # fade ends with M = I
        assert (metrics["scale_rms_log"] == 0) == (condition == "fade")
