"""The grid of long runs: what its cells train, and how cells are chosen."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_study_grids import NOWHERE

from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.size import Size
from acmoe.lab.study.study import choose
from acmoe.lab.variants import VariantConfig, variant_of
from acmoe.recipes import recipe

RECORDS = Path(__file__).parents[3] / "studies" / "records" / "long.jsonl"
# Plain and the paper's router with balance 0.01, plain with balance 0; seed 0.
RECORDED = {"8e0cd38c784e9ff8", "ea6f9ef0c35d1f5f", "a5fbc3a56260250e"}


def test_runs_are_the_recipes_and_as_long_as_declared():
    cells = STUDIES["long"].cells(NOWHERE, Size(), (0,), ("enwik8",))
    own = recipe("switch-enwik8")
    by_setting = {cell.setting.removeprefix("switch-enwik8, "): cell.config for cell in cells}
    for name, steps, balance in (
        ("balance 0.01", 10_000, 0.01),
        ("balance 0", 10_000, 0.0),
        ("constant", 16_000, 0.0),
    ):
        run = by_setting[name]
        assert (run.steps, run.model.balance, run.lr, run.clip) == (steps, balance, 7e-4, None)
        assert run.tokens_per_step == own.tokens_per_step == 24_576
        assert (run.split, run.precision, run.compile, run.graph) == (1, "bf16", True, True)
        assert run.steps % run.eval_every == run.steps % run.checkpoint_every == 0
    falling, constant = by_setting["balance 0"], by_setting["constant"]
    assert (falling.schedule, falling.warmup, falling.min_lr) == ("cosine", 1000, 7e-5)
    assert (constant.schedule, constant.warmup) == ("constant", own.warmup)
    routers = {cell.condition: cell.config.model.router for cell in cells}
    assert routers["adaptive-previous"] == recipe("switch-enwik8-acmoe").model.router
    words = STUDIES["long-words"].cells(NOWHERE, Size(), (0,))
    assert min(cell.config.steps * cell.config.tokens_per_step for cell in words) > 100e6


@pytest.mark.parametrize(
    ("part", "settings", "runs"),
    [("balance 0", 1, 4), ("balance 0.01", 1, 5), ("balance", 2, 9), ("rate 0", 2, 6)],
)
def test_a_setting_is_chosen_by_a_whole_part_of_its_name(part, settings, runs):
    cells = STUDIES["long"].cells(NOWHERE, Size(), (0,), ("enwik8",))
    chosen = choose(cells, (), (part,))
    assert len({cell.setting for cell in chosen}) == settings
    assert len(chosen) == runs


@pytest.mark.parametrize(
    ("setting", "condition", "seed"),
    [
        ("balance 0", "adaptive-previous", 0),
        ("balance 0.01", "adaptive-current", 3),
        ("published", "published", 0),
        ("published", "published-control", 0),
    ],
)
def test_a_setting_a_condition_and_a_seed_choose_one_cell(setting, condition, seed):
    cells = STUDIES["long"].cells(NOWHERE, Size(), (seed,), (setting,))
    (cell,) = choose(cells, (condition,), (setting,))
    assert cell.name == f"switch-enwik8, {setting} / {condition} / seed {seed}"


def test_the_condition_distance_differs_from_the_papers_in_the_rule_alone():
    cells = STUDIES["long"].cells(NOWHERE, Size(), (0,), ("enwik8",))
    (cell,) = choose(cells, ("distance",), ("balance 0.01",))
    assert [other.digest for other in cells if other.condition == "distance"] == [cell.digest]
    (paper,) = choose(cells, ("adaptive-previous",), ("balance 0.01",))
    router = cell.config.model.router
    assert isinstance(router, VariantConfig)
    assert router == variant_of(paper.config.model.router, distance=True)
    assert (router.statistics, router.reads, router.base.bias) == ("batch", "previous", True)
    model = replace(cell.config.model, router=paper.config.model.router)
    assert replace(cell.config, model=model) == paper.config
    assert ("distance", "smoe") in STUDIES["long"].comparisons


def test_the_condition_fade_differs_from_the_papers_in_an_m_that_ends_with_half_the_run():
    for setting in ("balance 0.01", "balance 0"):
        for steps in (None, 300):
            cells = STUDIES["long"].cells(NOWHERE, Size(steps=steps), (0,), ("enwik8",))
            (cell,) = choose(cells, ("fade",), (setting,))
            (paper,) = choose(cells, ("adaptive-previous",), (setting,))
            router = paper.config.model.router
            faded = variant_of(router, fade_steps=(steps or 10_000) // 2)
            model = replace(paper.config.model, router=faded)
            assert cell.config == replace(paper.config, model=model)
    assert sum(cell.condition == "fade" for cell in cells) == 2
    assert ("fade", "smoe") in STUDIES["long"].comparisons


def test_the_recorded_runs_are_still_cells_of_the_grid():
    found = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    assert {line["digest"] for line in found} >= RECORDED
    seeds = {line["seed"] for line in found}
    grids = {seed: STUDIES["long"].cells(NOWHERE, Size(), (seed,), ("enwik8",)) for seed in seeds}
    for line in found:
        cells = grids[line["seed"]]
        digests = {replace(cell, data=line["data"]).digest for cell in cells}
        assert line["digest"] in digests
