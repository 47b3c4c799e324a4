"""Accuracy under attack: it falls with the radius, goes on after a kill, and says what it means."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import acmoe.evaluate.images.attack as module
from acmoe import RandomConfig
from acmoe.config.images.attack import FGSMConfig, PGDConfig, SPSAConfig, attack_config
from acmoe.config.images.data import ImageEvaluateConfig
from acmoe.data.images.load import load_images
from acmoe.errors import UserError
from acmoe.evaluate.images.accuracy import evaluate_images
from acmoe.evaluate.images.attack import AttackReport, evaluate_attack
from acmoe.evaluate.images.attack_journal import fingerprint, open_journal
from acmoe.evaluate.statistics import own_statistics
from slow_cases import mostly_slow
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
SWEEP = replace(attack_config("pgd", eps=(0.02, 0.1)), attack=PGDConfig(steps=2), batch=8)
LABELS = [n % 10 for n in range(30)]


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


def count_attacks(monkeypatch: pytest.MonkeyPatch, *, stop_after: int | None = None) -> list[float]:
    """The radius of every batch attacked from now on; stops like a kill after some."""
    attacked: list[float] = []
    original = module.perturb

    def counted(*arguments: object, **options: object) -> torch.Tensor:
        if len(attacked) == stop_after:
            raise KeyboardInterrupt
        attacked.append(float(arguments[3]))  # type: ignore[arg-type]
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "perturb", counted)
    return attacked


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


def sweep(model: nn.Module, folder: Path | None) -> AttackReport:
    return evaluate_attack(model, random_images(LABELS), PLAIN, SWEEP, folder=folder)


@pytest.mark.parametrize(
    "stop_after", [4, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 1, 7))]
)
def test_a_killed_sweep_goes_on_and_ends_in_the_same_report(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    whole = sweep(tiny, None)
    with monkeypatch.context() as patch:
        count_attacks(patch, stop_after=stop_after)
        with pytest.raises(KeyboardInterrupt):
            sweep(tiny, tmp_path)
    attacked = count_attacks(monkeypatch)
    assert sweep(tiny, tmp_path) == whole
    assert len(attacked) == 8 - stop_after  # 4 batches for each of 2 radii
    assert sweep(tiny, tmp_path) == whole
    assert len(attacked) == 8 - stop_after  # all was there


def test_other_images_under_the_same_labels_are_not_in_the_journal(
    tiny: nn.Module, tmp_path: Path
) -> None:
    sweep(tiny, tmp_path)
    other = random_images(LABELS, seed=1)
    with pytest.raises(UserError, match="has other images than those attacked so far"):
        evaluate_attack(tiny, other, PLAIN, SWEEP, folder=tmp_path)


CHILD = """
from test_vision_attack import BATCH_STATISTICS, LABELS, PLAIN, SWEEP, TinyMoE
from test_vision_attack import evaluate_attack, random_images, seeded_model
import sys
from cpu import settle_cpu
settle_cpu()
model = seeded_model(lambda: TinyMoE(BATCH_STATISTICS))
tell = lambda *news: print(news, flush=True)
evaluate_attack(model, random_images(LABELS), PLAIN, SWEEP, folder=sys.argv[1], progress=tell)
"""


@pytest.mark.slow
def test_a_process_killed_at_once_leaves_a_journal_that_goes_on(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    ) as child:
        assert child.stdout is not None
        for _ in range(1 + 3 * 2 + 1):  # none done, two steps of three batches, one of the fourth
            assert child.stdout.readline()
        child.kill()
    attacked = count_attacks(monkeypatch)
    assert sweep(tiny, tmp_path) == sweep(tiny, None)
    assert len(attacked) <= 5 + 8


@pytest.mark.parametrize(
    "share",
    [0.5, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 0.1, 0.77, 0.99))],
)
def test_a_journal_cut_off_anywhere_is_continued(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    whole = sweep(tiny, tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    attacked = count_attacks(monkeypatch)
    assert sweep(tiny, tmp_path) == whole
    assert 0 < len(attacked) <= 8
    assert sorted(path.read_bytes().splitlines()) == sorted(content.splitlines())


def test_more_radii_add_to_what_is_there(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(tiny, tmp_path)
    attacked = count_attacks(monkeypatch)
    more = replace(SWEEP, eps=(0.1, 0.3))
    report = evaluate_attack(tiny, random_images(LABELS), PLAIN, more, folder=tmp_path)
    assert attacked == [0.3] * 4
    assert report == evaluate_attack(tiny, random_images(LABELS), PLAIN, more)


@mostly_slow(
    "change", ["weights", "labels", "batch", "seed", "attack", "limit", "statistics"], keep=(0,)
)
def test_nothing_is_reused_once_anything_changed(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    sweep(tiny, tmp_path)
    config, labels = SWEEP, LABELS
    if change == "weights":
        with torch.no_grad():
            tiny.head.bias[0] += 1
    elif change == "labels":
        labels = LABELS[::-1]
    else:
        other = {
            "batch": {"batch": 10},
            "seed": {"seed": 1},
            "attack": {"attack": PGDConfig(steps=1)},
            "limit": {"limit": 29},
            "statistics": {"statistics": "running"},
        }
        config = replace(SWEEP, **other[change])
    attacked = count_attacks(monkeypatch)
    evaluate_attack(tiny, random_images(labels), PLAIN, config, folder=tmp_path)
    assert len(attacked) == 2 * math.ceil((config.limit or 30) / config.batch)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_or_foreign_journal_is_refused(tiny: nn.Module, tmp_path: Path) -> None:
    sweep(tiny, tmp_path)
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{torn\n", *lines[1:]]))
    with pytest.raises(UserError, match=r"\.jsonl is damaged .*; delete it to attack anew"):
        sweep(tiny, tmp_path)
    path.write_bytes(b'{"attack": "other"}\n' + b"".join(lines[1:]))
    with pytest.raises(UserError, match="was begun with other settings; delete it"):
        sweep(tiny, tmp_path)


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    settings = {"attack": {"name": "pgd"}}
    with (
        open_journal(tmp_path, settings),
        pytest.raises(UserError, match="in use by another process"),
        open_journal(tmp_path, settings),
    ):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, tiny: nn.Module) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*attack-pgd-.*\.jsonl"):
        sweep(tiny, tmp_path / "file")


def test_a_model_of_other_classes_is_refused() -> None:
    model = seeded_model(lambda: Linear(7, 8))
    with pytest.raises(UserError, match="the model knows 7 classes, the images have 10"):
        evaluate_attack(model, random_images(LABELS), PLAIN, SWEEP)


def test_a_fingerprint_is_of_the_weights_alone() -> None:
    first, again, other = (
        seeded_model(lambda: TinyMoE(BATCH_STATISTICS), seed=seed) for seed in (0, 0, 1)
    )
    assert fingerprint(first) == fingerprint(again.train()) != fingerprint(other)
