"""Accuracy under attack: it falls with the radius, and a report says what it depends on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attack_cases import LABELS, SWEEP, sweep
from torch import nn

import acmoe.evaluate.images.attack as module
from acmoe import RandomConfig
from acmoe.config.images.attack import FGSMConfig, PGDConfig, SPSAConfig, attack_config
from acmoe.config.images.data import ImageEvaluateConfig
from acmoe.data.images.load import load_images
from acmoe.errors import UserError
from acmoe.evaluate.images.accuracy import evaluate_images
from acmoe.evaluate.images.attack import evaluate_attack
from acmoe.evaluate.images.attack_journal import fingerprint
from acmoe.evaluate.statistics import own_statistics
from vision_cases import (
    BATCH_STATISTICS,
    PLAIN,
    Linear,
    TinyMoE,
    random_images,
    seeded_model,
    trained_on_digits,
)

RADII = (8 / 255, 32 / 255, 64 / 255)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return trained_on_digits()


@pytest.fixture
def tiny() -> nn.Module:
    return seeded_model(lambda: TinyMoE(BATCH_STATISTICS))


@pytest.mark.parametrize(
    ("attack", "lost"),
    [
        (FGSMConfig(), 25),
        (PGDConfig(steps=7, step_size=0.3), 50),
        pytest.param(
            SPSAConfig(steps=4, directions=24, copies=8, lr=0.05), 10, marks=pytest.mark.slow
        ),
    ],
)
def test_a_trained_classifier_loses_accuracy_with_every_radius(
    trained: nn.Module, attack: FGSMConfig | PGDConfig | SPSAConfig, lost: float
) -> None:
    limit = 64 if attack.name == "spsa" else 128  # which asks the model 24 times as often
    config = replace(attack_config(attack.name, eps=RADII), attack=attack, batch=64, limit=limit)
    report = evaluate_attack(trained, load_images(PLAIN).test, PLAIN, config)
    assert report.clean_top1 > 85
    accuracy = [report.clean_top1, *(figure.top1 for figure in report.figures)]
    assert accuracy == sorted(accuracy, reverse=True)
    assert accuracy[0] - accuracy[-1] > lost
    moved = [figure.moved for figure in report.figures]
    assert all(len(layers) == 2 for layers in moved)
    assert moved[0][0] < moved[-1][0] and 0 < moved[-1][1] <= 100


def test_the_clean_figures_are_those_of_an_evaluation(tiny: nn.Module) -> None:
    images = random_images(LABELS)
    report = evaluate_attack(tiny, images, PLAIN, SWEEP)
    (figure,) = evaluate_images(tiny, images, PLAIN, ImageEvaluateConfig(batch=8)).figures
    assert (report.clean_top1, report.clean_top5) == (figure.top1, figure.top5)


def test_a_report_states_what_it_depends_on_and_is_json(tiny: nn.Module) -> None:
    told: list[tuple[str, int, int]] = []
    report = evaluate_attack(
        tiny,
        random_images(LABELS),
        PLAIN,
        replace(SWEEP, limit=20, seed=4),
        progress=lambda *news: told.append(news),
    )
    document = json.loads(json.dumps(report.to_json()))
    assert document["attack"] == {
        "name": "pgd",
        "steps": 2,
        "step_size": 0.15,
        "random_start": True,
    }
    wanted = {
        "space": "pixel",
        "clamp": True,
        "labels": "true",
        "precision": "fp32",
        "data": "noise",
        "split": "test",
        "images": 20,
        "size": 8,
        "batch": 8,
        "order": "shuffled",
        "seed": 4,
        "statistics": "batch",
        "capacity": None,
    }
    assert {key: document[key] for key in wanted} == wanted
    assert [figure["eps"] for figure in document["figures"]] == [0.02, 0.1]
    # Two steps for each of three batches.
    assert told == [(f"pgd, eps {eps}, steps", n, 6) for eps in ("0.02", "0.1") for n in range(7)]


def test_the_capacity_is_stated_and_enters_the_journals_name(tmp_path: Path) -> None:
    model = seeded_model(lambda: TinyMoE(BATCH_STATISTICS, capacity=1.0))
    reports = [
        evaluate_attack(model, random_images(LABELS), PLAIN, config, folder=tmp_path)
        for config in (SWEEP, replace(SWEEP, capacity="model"), replace(SWEEP, capacity=1.0))
    ]
    assert [report.capacity for report in reports] == [None, 1.0, 1.0]
    assert reports[0].figures != reports[1].figures and reports[1] == reports[2]
    # A journal of another capacity is not continued; "model" and 1.0 are the same one here.
    journals = sorted(tmp_path.glob("attack-pgd-*.jsonl"))
    settings = [json.loads(path.read_text().splitlines()[0]) for path in journals]
    assert sorted(str(one["capacity"]) for one in settings) == ["1.0", "None"]
    assert attack_config("pgd", preset="paper").capacity == "model"


def test_predicted_labels_are_moved_away_from_even_where_they_are_wrong() -> None:
    # A linear classifier, one image it gets wrong: moving away from the wrong answer can only
    # help the truth, moving away from the truth can only hurt it.
    model, images = seeded_model(lambda: Linear(10, 8)), random_images(LABELS)
    true, predicted = (
        evaluate_attack(
            model,
            images,
            PLAIN,
            replace(attack_config("fgsm", eps=(0.05,)), labels=labels),
        )
        for labels in ("true", "predicted")
    )
    assert true.figures[0].top1 < predicted.figures[0].top1
    assert true.clean_top1 == predicted.clean_top1


def test_the_papers_preset_attacks_normalised_images(tiny: nn.Module) -> None:
    config = replace(attack_config("fgsm", preset="paper", eps=(1.0,)), batch=8)
    report = evaluate_attack(tiny, random_images(LABELS), PLAIN, config)
    assert (report.space, report.clamp, report.labels) == ("normalized", False, "predicted")
    # eps = 1 in units of the deviation is 0.376 of the range of pixels.
    pixel = replace(attack_config("fgsm", eps=(0.376,)), batch=8, clamp=False, labels="predicted")
    other = evaluate_attack(tiny, random_images(LABELS), PLAIN, pixel)
    assert report.figures[0].moved == pytest.approx(other.figures[0].moved, abs=0.5)


def test_the_model_comes_back_as_it_was(tiny: nn.Module) -> None:
    tiny.train()
    before = fingerprint(tiny)
    evaluate_attack(tiny, random_images(LABELS), PLAIN, replace(SWEEP, statistics="running"))
    assert tiny.training and own_statistics(tiny) == "batch" and fingerprint(tiny) == before
    assert all(layer.router.config.detach for layer in tiny.layers)
    assert all(parameter.grad is None for parameter in tiny.parameters())


def test_routers_that_draw_at_random_are_attacked_the_same_every_time() -> None:
    model = seeded_model(lambda: TinyMoE(RandomConfig()))
    first, again = (
        evaluate_attack(model, random_images(LABELS), PLAIN, SWEEP).to_json() for _ in range(2)
    )
    assert first == again


def test_every_batch_and_radius_draws_for_itself(
    tiny: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    original = module.perturb

    def noted(*arguments: object, seed: int, **options: object) -> torch.Tensor:
        seeds.append(seed)
        return original(*arguments, seed=seed, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "perturb", noted)
    sweep(tiny, None)
    assert len(seeds) == len(set(seeds)) == 8


def test_a_model_of_other_classes_is_refused() -> None:
    model = seeded_model(lambda: Linear(7, 8))
    with pytest.raises(UserError, match="the model knows 7 classes, the images have 10"):
        evaluate_attack(model, random_images(LABELS), PLAIN, SWEEP)
