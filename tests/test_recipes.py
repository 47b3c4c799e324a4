"""Every recipe of a language model builds and says what the paper says; all say what we found."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pytest
import torch

from acmoe.config.routing import AdaptiveConfig, RandomConfig, SMoEConfig, ThresholdConfig
from acmoe.config.text.language import LANGUAGE_MODELS, language_router
from acmoe.config.text.train import RunConfig
from acmoe.errors import UserError
from acmoe.lab.study.grids.nano import IMAGE_SETTING, TEXT_SETTING
from acmoe.models.count import count_parameters
from acmoe.models.registry import build_model, list_models
from acmoe.recipes import recipe, recipes
from acmoe.routing.layer_plan import adaptive_depths

# The paper's tables: Switch and GLaM pretraining, dispersion, placement, random, mixing, top-p.
REPORTED = {
    "switch-small": "87.94",
    "switch-small-xmoe": "87.21",
    "switch-small-acmoe": "85.07",
    "switch-medium": "35.48",
    "switch-medium-xmoe": "35.88",
    "switch-medium-stablemoe": "35.33",
    "switch-medium-acmoe": "34.42",
    "glam-small": "58.27",
    "glam-small-xmoe": "54.80",
    "glam-small-acmoe": "54.55",
    "glam-medium": "38.27",
    "glam-medium-xmoe": "38.10",
    "glam-medium-stablemoe": "38.04",
    "glam-medium-acmoe": "36.26",
    "switch-enwik8": "1.153",
    "switch-enwik8-acmoe": "1.137",
    "switch-enwik8-published": "1.137",
    "switch-medium-acmoe-variance": "34.87",
    "switch-medium-acmoe-full": "34.88",
    "switch-medium-acmoe-alternating": "34.80",
    "switch-medium-acmoe-back-half": "34.95",
    "switch-medium-random": "38.17",
    "switch-medium-acmoe-mix2": "34.66",
    "glam-medium-acmoe-mix2": "35.29",
    "switch-medium-topp": "35.20",
    "switch-medium-topp-acmoe": "34.14",
    "switch-medium-topp-learnable": "34.29",
    "switch-medium-topp-learnable-acmoe": "33.49",
}
OURS_ALONE = {
    *("switch-medium-acmoe-published", "switch-medium-control"),
    "switch-enwik8-published-control",
    *("switch-nano", "switch-nano-acmoe", "glam-nano", "glam-nano-acmoe"),
    *("switch-nano-published", "switch-nano-published-control"),
}


RESULTS = Path(__file__).parents[1] / "studies" / "records"


class Measured(NamedTuple):
    """The place of the runs behind a figure in a recipe's docstring."""

    study: str
    setting: str
    condition: str
    metric: str = "test"
    digits: int = 2

    @property
    def runs(self) -> list[dict[str, Any]]:
        asked = ("done", self.setting, self.condition)
        lines = map(json.loads, (RESULTS / f"{self.study}.jsonl").read_text().splitlines())
        found = (line for line in lines if self.metric in line.get("metrics", {}))
        return [
            line for line in found if (line["status"], line["setting"], line["condition"]) == asked
        ]

    @property
    def values(self) -> list[float]:
        return [run["metrics"][self.metric] for run in self.runs]

    @property
    def text(self) -> str:
        return f"{fmean(self.values):.{self.digits}f} +- {stdev(self.values):.{self.digits}f}"


def _words(condition: str) -> list[Measured]:
    own = Measured("words", "switch-small, dropout 0.7", condition)
    test = own._replace(setting="switch-small, dropout 0.1")
    return [own, test, *(test._replace(metric=task) for task in ("sst2", "sst5", "banking77"))]


def _bytes(condition: str, confirmed: str) -> list[Measured]:
    own = Measured("bytes", "switch-enwik8, post-norm, balance 0.01", condition, digits=4)
    return [
        own,
        own._replace(setting="switch-enwik8, post-norm, balance 0"),
        Measured("confirm", "switch-enwik8, pre-norm", confirmed, digits=4),
    ]


def _published(condition: str) -> list[Measured]:
    return [Measured("long", "switch-enwik8, published", condition, digits=4)]


def _images(condition: str, *settings: str) -> list[Measured]:
    clean = [Measured("vision", setting, condition) for setting in settings]
    return [*clean, clean[0]._replace(metric="pgd 1/255")]


_SWIN = ("swin, two experts", "swin, one expert")
# All figures of a docstring, the one it begins with first.
MEASURED = {
    "switch-small": _words("smoe"),
    "switch-small-acmoe": _words("adaptive-previous"),
    "glam-small": [Measured("words", "glam-small, dropout 0.1", "smoe")],
    "glam-small-acmoe": [Measured("words", "glam-small, dropout 0.1", "adaptive-previous")],
    "switch-enwik8": _bytes("smoe", "smoe"),
    "switch-enwik8-acmoe": _bytes("adaptive-previous", "adaptive"),
    "switch-enwik8-published": _published("published"),
    "switch-enwik8-published-control": _published("published-control"),
    "switch-nano": [Measured("nano", TEXT_SETTING, "smoe", digits=4)],
    "switch-nano-acmoe": [Measured("nano", TEXT_SETTING, "adaptive-previous", digits=4)],
    "swin-imagenette": _images("smoe", *_SWIN),
    "swin-imagenette-acmoe": _images("adaptive-previous", *_SWIN),
    "softmoe-imagenette": _images("smoe", "softmoe"),
    "softmoe-imagenette-acmoe": _images("adaptive-previous", "softmoe"),
    "swin-nano": [Measured("nano", IMAGE_SETTING, "smoe")],
    "swin-nano-acmoe": [Measured("nano", IMAGE_SETTING, "adaptive-previous")],
}
ONE_SEED = {"softmoe-nano", "softmoe-nano-acmoe"}  # runs of their own, no study's

LANGUAGE = {
    name: found for name, found in recipes().items() if isinstance(found.build(), RunConfig)
}


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_recipe_builds_its_model(name: str) -> None:
    config = recipe(name).model
    with torch.device("meta"):
        model = build_model(replace(config, router=language_router(config.router, config)))
    assert count_parameters(model).total > 300_000


def test_every_row_of_the_papers_tables_is_a_recipe_with_its_figure() -> None:
    found = LANGUAGE
    assert set(found) == set(REPORTED) | OURS_ALONE
    for name, figure in REPORTED.items():
        assert f"(paper: {figure} " in found[name].description, name


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_says_in_one_line_what_it_is_and_what_we_measured(name: str) -> None:
    found = recipes()[name]
    assert 0 < len(found.description) <= 100
    unmeasured = "Ours: not measured yet." in _said(name)
    assert unmeasured == (name not in {*MEASURED, *ONE_SEED})


@pytest.mark.parametrize("name", MEASURED)
def test_what_a_recipe_says_we_measured_stands_in_the_results(name: str) -> None:
    said, measured = _said(name), MEASURED[name]
    assert f"Ours: {measured[0].text}" in said
    # Each figure, no other, and how many seeds each has.
    assert sorted(re.findall(r"[\d.]+ \+- [\d.]+\d", said)) == sorted(one.text for one in measured)
    assert set(re.findall(r"n = (\d+)", said)) == {str(len(one.values)) for one in measured}


@pytest.mark.parametrize("name", MEASURED)
def test_a_recipe_says_where_what_we_measured_differs_from_it(name: str) -> None:
    said, own = _said(name), _flat(asdict(recipe(name)))
    runs = [_flat(run["config"]) for one in MEASURED[name] for run in one.runs]
    named = {
        "steps": "{:,} updates",
        "precision": "{}",
        "split": "split {}",
        "schedule": "a falling rate",
        "augment.mixup": "cropped and mirrored alone",
        "model.dropout": "dropout {}",
        "model.balance": "balance {:g}",
        "model.span": "span {}",
        "model.norm": "`model.norm={}`",
        "model.top_k": "`model.top_k={}`",
        "model.router.statistics": "statistics of the {}",
    }
    for key, words in named.items():
        for value in {run[key] for run in runs if key in run and run[key] != own[key]}:
            assert words.format(value) in said, (key, value)


def _said(name: str) -> str:
    return " ".join((recipes()[name].build.__doc__ or "").split())


def _flat(config: dict[str, Any], start: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{start}{key}.") if isinstance(value, dict) else {start + key: value}
    return flat


def test_every_language_model_is_a_recipe_of_its_plain_router_or_as_published() -> None:
    for name in set(list_models()) & set(LANGUAGE_MODELS):
        published = AdaptiveConfig.preset("reference-lm")
        expected = published if name.endswith("-published") else SMoEConfig(bias=True)
        assert recipe(name).model.router == expected
        assert recipe(name).model == LANGUAGE_MODELS[name].config


def test_sizes_of_training_are_the_papers() -> None:
    #                  updates, streams, block, warmup
    expected = {
        "switch-small": (40_000, 96, 256, 3000),
        "switch-medium": (80_000, 48, 512, 4000),
        "glam-small": (60_000, 48, 512, 3000),
        "glam-medium": (120_000, 48, 512, 4000),
        "switch-enwik8": (80_000, 48, 512, 4000),
    }
    for name, sizes in expected.items():
        run = recipe(name)
        assert (run.steps, run.batch, run.model.block, run.warmup) == sizes
        assert run.tokens_per_step == 24_576
        # Four GPUs with two micro-batches each: the tokens one forward pass saw.
        assert run.tokens_per_step // run.split == 3_072
        assert (run.lr, run.betas, run.weight_decay, run.clip) == (7e-4, (0.9, 0.999), 0.0, None)
        assert (run.schedule, run.precision, run.model.balance) == ("constant", "fp32", 0.01)
    assert recipe("switch-medium").epochs == 80


def test_acmoe_differs_from_its_baseline_in_the_router_alone() -> None:
    for base in ("switch-small", "switch-medium", "glam-small", "glam-medium", "switch-enwik8"):
        plain, adaptive = recipe(base), recipe(f"{base}-acmoe")
        router = adaptive.model.router
        assert isinstance(router, AdaptiveConfig)
        assert router.base == plain.model.router
        assert (router.statistics, router.reads, router.measure) == ("batch", "previous", "mad")
        assert replace(adaptive, model=replace(adaptive.model, router=router.base)) == plain


def test_ablations_change_the_one_thing_they_are_named_after() -> None:
    headline = recipe("switch-medium-acmoe").model

    def model(name: str) -> object:
        return recipe(f"switch-medium-{name}").model

    router = headline.router
    assert isinstance(router, AdaptiveConfig)
    changed = replace(headline, router=replace(router, measure="variance"))
    assert model("acmoe-variance") == changed
    assert model("acmoe-mix2") == replace(headline, router=replace(router, mix=2))
    assert model("random") == replace(headline, router=RandomConfig(base=router.base))
    topp = ThresholdConfig(bias=True, threshold=0.05)
    assert model("topp") == replace(headline, router=topp)
    assert model("topp-acmoe") == replace(headline, router=replace(router, base=topp))
    # Depths from 0: the paper's layers 3-6, 2-6, 2 4 6 and 4-6.
    depths = {
        name: adaptive_depths(recipe(f"switch-medium-{name}").model.placement, 6)
        for name in ("acmoe", "acmoe-full", "acmoe-alternating", "acmoe-back-half")
    }
    assert depths == {
        "acmoe": (2, 3, 4, 5),
        "acmoe-full": (1, 2, 3, 4, 5),
        "acmoe-alternating": (1, 3, 5),
        "acmoe-back-half": (3, 4, 5),
    }


def test_the_control_is_the_published_gate_without_its_scale() -> None:
    published = recipe("switch-medium-acmoe-published").model
    control = recipe("switch-medium-control").model
    assert isinstance(published.router, AdaptiveConfig)
    assert isinstance(published.router.base, SMoEConfig)
    assert published.router.base.normalize_embeddings
    assert replace(published, router=published.router.base) == control


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"did you mean switch-medium"):
        recipe("switch-medum")
    with pytest.raises(UserError, match=r"choose one of switch-small"):
        recipe("???")
