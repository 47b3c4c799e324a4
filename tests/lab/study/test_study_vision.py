"""The image study from a folder of pixels to its page, on images of sixteen pixels a side."""

from dataclasses import replace

import numpy as np
import pytest

from acmoe.config.images.data import AugmentConfig
from acmoe.config.images.vision import SwinConfig
from acmoe.lab.study.grids.images import PGD, SPSA, vision_study
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.registry import VISION
from acmoe.lab.study.results.report import report
from acmoe.lab.study.size import Size
from acmoe.lab.study.worker import run_cell
from study_cases import write_results

SMALL = ("precision=fp32", "model.dim=24", "eval_images=4")
SIZE = Size(steps=2, batch=4, images=2, spsa_images=1, device="cpu", overrides=SMALL)


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    (folder / "imagenette").mkdir()
    rng = np.random.default_rng(0)
    for split, count in (("train", 120), ("val", 12)):
        labels = np.arange(count) % 10
        pixels = rng.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        np.savez(folder / "imagenette" / f"{split}.npz", images=pixels, labels=labels)
    found = vision_study(Materials(data=folder, work=folder / "work"), SIZE, (0,))
    return {(cell.setting, cell.condition): cell for cell in found}


def shallow(cell):
    """Fewer blocks and experts; a second MoE layer of the adaptive stage reads the first."""
    model = cell.config.model
    if isinstance(model, SwinConfig):
        model = replace(model, depths=(1, 4, 1), moe_stages=(1,), num_experts=4)
    else:
        model = replace(model, depth=3, moe_blocks=2, num_experts=8)
    return replace(cell, config=replace(cell.config, model=model))


def test_cells_keep_their_images_on_the_device_and_crop_them_there(cells):
    for cell in cells.values():
        assert cell.config.data.on_device
        assert cell.config.augment == AugmentConfig.preset("crop")


def test_attacks_of_both_presets_are_asked_for(cells):
    (attacks,) = {cell.tests.attacks for cell in cells.values()}
    by_kind = {(one.attack.name, one.space): one for one in attacks}
    assert len(by_kind) == len(attacks) == 6
    assert by_kind["pgd", "pixel"].attack == PGD
    paper = by_kind["pgd", "normalized"]
    assert (paper.attack.steps, paper.attack.step_size, paper.eps) == (20, 0.15, (1 / 255,))
    # 10 steps of 0.3 go as far as 20 of 0.15.
    assert PGD.steps * PGD.step_size == paper.attack.steps * paper.attack.step_size
    for space in ("pixel", "normalized"):
        assert by_kind["fgsm", space].precision == by_kind["pgd", space].precision == "bf16"
        assert by_kind["spsa", space].attack == SPSA
        assert by_kind["spsa", space].precision == "fp32"


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["swin, two experts", "softmoe"])
def test_two_cells_fill_every_column_of_the_page(setting, cells, tmp_path):
    news, lines = [], []
    for condition in ("smoe", "adaptive-previous"):
        record = run_cell(shallow(cells[setting, condition]), None, news.append)
        assert {metric.key for metric in VISION.compared} <= record["metrics"].keys()
        assert record["details"]["scored"]["images"] == 12
        lines.append({**record, "environment": {"device": "cpu"}, "options": SIZE.text})
    assert f"pgd, eps 4/255, steps {PGD.steps} of {PGD.steps}" in news
    page = tmp_path / "page.md"
    page.write_text("<!-- study:vision:begin -->\n<!-- study:vision:end -->\n")
    report(VISION, write_results(tmp_path / "vision.jsonl", lines), page, tmp_path / "pictures")
    text = page.read_text()
    assert VISION.note.partition(";")[0] in text
    for metric in VISION.compared:
        assert metric.label in text
