"""The study of a CPU and no data folder: its grid is what it says, and a cell of each kind runs."""

import functools
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from acmoe.config.images.attack import eps_text
from acmoe.config.serialize import encode, flatten
from acmoe.data.images.digits import load_digit_splits
from acmoe.lab.study.grids.nano import IMAGE_SETTING, RADII, TEST_BATCH, TEXT_SETTING
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.page import markers
from acmoe.lab.study.results.report import report
from acmoe.lab.study.results.summary import summarise
from acmoe.lab.study.size import Size
from acmoe.lab.study.worker import run_cell
from acmoe.recipes import recipe
from slow_cases import mostly_slow
from study_cases import record, write_results

pytest.importorskip("sklearn")

RECORDS = Path(__file__).parents[3] / "studies" / "records"
NANO = STUDIES["nano"]
SHORT = Size(megabytes=0.04, device="cpu")


class PreparedOnce(Materials):
    """Materials that look through Python's standard library once for each size."""

    stdlib = functools.cache(Materials.stdlib)


@pytest.fixture(scope="module")
def materials(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nano")
    return PreparedOnce(data=folder / "none", work=folder)


@functools.cache
def grid_of(materials, size, seeds):
    return NANO.cells(materials, size, seeds)


def cells_of(materials, setting, size=SHORT, seeds=(0, 1)):
    return [cell for cell in grid_of(materials, size, seeds) if cell.setting == setting]


def test_the_grid_is_fifty_cells_of_the_recipes_models(materials):
    cells = NANO.cells(materials, SHORT, range(NANO.seeds))
    assert len(cells) == 50  # 5 seeds of 6 routers on text and of 4 on images
    kept = ("lr", "batch", "schedule", "min_lr", "clip", "precision", "weight_decay")
    recipes = {TEXT_SETTING: recipe("switch-nano"), IMAGE_SETTING: recipe("swin-nano")}
    for cell in cells:
        own, found = recipes[cell.setting], cell.config
        assert replace(found.model, router=own.model.router) == own.model
        assert [getattr(found, key) for key in kept] == [getattr(own, key) for key in kept]
    assert cells[-1].config.augment == recipe("swin-nano").augment


def test_cells_of_images_keep_the_identity_of_the_published_records(materials):
    # With the capacity of training and without averaged weights, as they were run.
    lines = (RECORDS / "nano.jsonl").read_text().splitlines()
    known = {record["digest"] for record in map(json.loads, lines)}
    cells = cells_of(materials, IMAGE_SETTING)
    assert {cell.digest for cell in cells} <= known
    attacks = [attack for cell in cells for attack in cell.tests.attacks]
    assert all(attack.capacity == "model" for attack in attacks)
    free = replace(cells[0].tests, attacks=tuple(replace(one, capacity=None) for one in attacks))
    assert replace(cells[0], tests=free).digest not in known


@pytest.mark.parametrize(("setting", "routers"), [(TEXT_SETTING, 6), (IMAGE_SETTING, 4)])
def test_nano_conditions_of_a_seed_differ_in_the_router_alone(materials, setting, routers):
    pairs = defaultdict(list)
    for cell in cells_of(materials, setting):
        settings = flatten(encode(cell.config))
        rest = {key: value for key, value in settings.items() if not key.startswith("model.router")}
        pairs[cell.seed].append((rest, cell.tests, cell.data, cell.size))
    assert set(pairs) == {0, 1}
    for first, *others in pairs.values():
        assert len(others) == routers - 1
        assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("setting", "condition", "baseline"),
    [
        (TEXT_SETTING, "adaptive-previous", "smoe"),
        (TEXT_SETTING, "adaptive-current", "smoe"),
        (TEXT_SETTING, "reference-lm", "control"),
        (IMAGE_SETTING, "adaptive-previous", "smoe"),
    ],
)
def test_a_nano_adaptive_router_wraps_the_gate_it_is_compared_with(
    materials, setting, condition, baseline
):
    routers = {cell.condition: cell.config.model.router for cell in cells_of(materials, setting)}
    assert routers[condition].base == routers[baseline]
    assert (condition, baseline) in NANO.comparisons


def test_the_text_is_the_running_pythons_and_no_data_folder_is_read(materials):
    (cell, *_) = cells_of(materials, TEXT_SETTING)
    text = materials.stdlib(0.04)
    assert text.limit == cell.config.data.limit == 40_000
    assert cell.data == text.fingerprint
    assert cell.data != materials.stdlib(0.05).fingerprint
    assert not materials.data.exists()
    assert not NANO.reads()


def test_all_digits_are_attacked_and_pgd_can_cross_the_ball(materials):
    (cell, *_) = cells_of(materials, IMAGE_SETTING)
    for attack in cell.tests.attacks:
        assert (attack.space, attack.clamp, attack.labels) == ("pixel", True, "true")
        assert attack.limit is None
        assert [eps_text(eps) for eps in attack.eps] == [f"{level}/255" for level in RADII]
    fgsm, pgd = (attack.attack for attack in cell.tests.attacks)
    assert fgsm.name == "fgsm"
    assert pgd.steps * pgd.step_size >= 2  # step_size is a share of the radius


def test_a_nano_cell_has_the_size_that_is_asked_for(materials):
    size = replace(SHORT, steps=30, batch=4, tokens=99, images=7, overrides=("lr=1e-3",))
    text, images = (cells_of(materials, each, size)[0] for each in (TEXT_SETTING, IMAGE_SETTING))
    assert text.size == "30 steps of 512 bytes"  # 4 streams of 128
    assert images.size == "30 steps of 4 images"
    assert text.tests.tokens == 99
    assert [attack.limit for attack in images.tests.attacks] == [7, 7]
    for run in (text.config, images.config):
        assert (run.steps, run.warmup, run.eval_every, run.lr) == (30, 3, 5, 1e-3)
        assert run.device == "cpu"
    (brief, *_) = cells_of(materials, IMAGE_SETTING, replace(size, images=None, brief=True))
    assert brief.tests.attacks == ()


def test_the_binomial_spread_that_is_told_is_that_of_the_test_images():
    images = len(load_digit_splits(size=8).test)
    assert images == 2 * TEST_BATCH
    assert f"{images} test images" in NANO.note
    near, middle = (100 * math.sqrt(p * (1 - p) / images) for p in (0.95, 0.5))
    assert f"near 95 % would vary by {near:.1f} points" in NANO.note
    assert f"near 50 % by {middle:.1f}." in NANO.note


@mostly_slow("setting", [TEXT_SETTING, IMAGE_SETTING])
def test_a_cell_of_each_kind_measures_all_that_is_shown_of_it(materials, setting):
    size = replace(SHORT, steps=2, batch=4, tokens=300, images=5)
    cells = cells_of(materials, setting, size, seeds=(1,))
    (cell,) = (cell for cell in cells if cell.condition == "adaptive-previous")
    found = run_cell(cell, None, lambda text: None)
    shown = {metric.key for metric in NANO.compared if metric.is_of(setting)}
    assert shown | {"load_balance", "instability", "scale_rms_log"} <= found["metrics"].keys()
    assert len(found["curves"][NANO.curve]) == 2
    assert ("pgd 8/255 moved" in found["metrics"]) == (setting == IMAGE_SETTING)


def line(setting, condition, seed, test):
    digest = f"{setting} {condition} {seed}"
    return record(condition, seed, test, study="nano", setting=setting, digest=digest)


def bits_and_accuracies():
    """Bits fall by 0.10, 0.11 and 0.12; accuracies by 5, 6 and 7 points."""
    made = []
    for seed in range(3):
        made += [
            line(TEXT_SETTING, "smoe", seed, 3.0),
            line(TEXT_SETTING, "adaptive-previous", seed, 2.9 - 0.01 * seed),
            line(IMAGE_SETTING, "smoe", seed, 95.0),
            line(IMAGE_SETTING, "adaptive-previous", seed, 90.0 - seed),
        ]
    return made


def test_bits_and_accuracies_are_never_one_family(tmp_path):
    pytest.importorskip("matplotlib")
    begin, end = markers("nano")
    page = tmp_path / "page.md"
    page.write_text(f"{begin}\n{end}\n")
    results = write_results(tmp_path / "nano.jsonl", bits_and_accuracies())
    files = {path.name for path in report(NANO, results, page, tmp_path)}
    drawn = ("switch-nano-standard-library", "swin-nano-digits")
    assert {f"nano-differences-{name}.svg" for name in drawn} <= files

    compared = summarise(NANO, bits_and_accuracies()).comparisons
    assert [(one.metric.label, one.group.partition(";")[0]) for one in compared] == [
        ("test bits per byte", TEXT_SETTING),
        ("top-1 (%)", IMAGE_SETTING),
    ]
    text = page.read_text()
    assert NANO.note in text
    # Lower bits are better, lower accuracies worse. Differences of -5, -6, -7: mean -6, standard
    # error 1 / sqrt(3), t = -10.39 with 2 degrees of freedom, p = 0.0091.
    assert f"adaptive-previous is better than smoe ({TEXT_SETTING}" in text
    assert f"adaptive-previous is worse than smoe ({IMAGE_SETTING}" in text
    assert "| top-1 (%) | adaptive-previous | smoe | 3 | -6.00 [-8.48, -3.52] |" in text
    assert text.count("Pairs share a seed") == 1
