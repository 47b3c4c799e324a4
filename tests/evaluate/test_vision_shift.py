"""Shifted sets: choices among their own classes, and the area under precision and recall."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from acmoe.config.images.data import ImageEvaluateConfig
from acmoe.errors import UserError
from acmoe.evaluate.images.shift import average_precision, evaluate_shift
from vision_cases import BATCH_STATISTICS, PLAIN, Linear, TinyMoE, random_images, seeded_model

CLASSES = tuple(f"n{number}" for number in range(10))
FOLDERS = ("n2", "n5", "n7")


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 999), st.booleans())
def test_average_precision_is_scikit_learns(
    positive: int, negative: int, seed: int, ties: bool
) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=positive + negative)
    scores = np.round(scores) if ties else scores
    labels = np.arange(positive + negative) < positive
    wanted = average_precision_score(labels, scores)
    assert math.isclose(average_precision(scores[:positive], scores[positive:]), wanted)


def test_average_precision_by_hand() -> None:
    # From the highest: + - + -. Recall 1/2 at precision 1, then 1 at precision 2/3.
    assert math.isclose(average_precision(np.array([4.0, 2.0]), np.array([3.0, 1.0])), 5 / 6)
    # No score tells anything: the share of positives.
    assert average_precision(np.zeros(2), np.zeros(10)) == 2 / 12
    assert average_precision(np.ones(3), np.zeros(5)) == 1.0


def test_curves_of_one_kind_or_without_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="needs images of both kinds"):
        average_precision(np.zeros(2), np.zeros(0))
    with pytest.raises(UserError, match="a confidence is not finite"):
        average_precision(np.array([math.nan]), np.zeros(1))


def logits_of(model: Linear, images: object, index: int) -> torch.Tensor:
    mean, std = (np.asarray(value) for value in PLAIN.normalization)
    x = torch.from_numpy((images.pixels(index) / 255 - mean) / std).permute(2, 0, 1)
    return model.head.weight.detach().double() @ x.flatten() + model.head.bias.detach().double()


def test_a_choice_is_made_among_the_sets_own_classes() -> None:
    model = seeded_model(lambda: Linear(10, 8))
    shifted = random_images([n % 3 for n in range(25)], classes=FOLDERS)
    report = evaluate_shift(
        model, "imagenet-a", shifted, PLAIN, ImageEvaluateConfig(batch=4), classes=CLASSES
    )
    hits = sum(
        int(logits_of(model, shifted, index)[[2, 5, 7]].argmax()) == index % 3
        for index in range(25)
    )
    assert report.value == 100 * hits / 25 and report.metric == "top-1 accuracy (%)"
    assert math.isclose(report.chance, 100 / 3)
    assert (report.images, report.clean_images, report.classes) == (25, 0, 3)
    assert json.loads(json.dumps(report.to_json()))["statistics"] == "none"


def test_labels_name_their_classes_whatever_the_order_of_the_models_classes() -> None:
    model = seeded_model(lambda: Linear(10, 8))
    shifted = random_images([n % 3 for n in range(25)], classes=FOLDERS)
    # The model's classes are not sorted: n7 is its class 2, n5 its class 4 and n2 its class 7.
    order = ("n9", "n8", "n7", "n6", "n5", "n4", "n3", "n2", "n1", "n0")
    report = evaluate_shift(model, "imagenet-a", shifted, PLAIN, classes=order)
    hits = sum(
        int(logits_of(model, shifted, index)[[7, 4, 2]].argmax()) == index % 3
        for index in range(25)
    )
    assert report.value == 100 * hits / 25


def test_strangers_are_found_by_low_confidence_among_known_classes() -> None:
    model = seeded_model(lambda: Linear(10, 8))
    strange = random_images([n % 3 for n in range(6)], classes=FOLDERS, seed=1)
    clean = random_images([n % 10 for n in range(40)], classes=CLASSES, seed=2)
    report = evaluate_shift(model, "imagenet-o", strange, PLAIN, classes=CLASSES, clean=clean)
    scores, labels = [], []
    for images, chosen, is_strange in (
        (strange, range(6), True),
        (clean, [n for n in range(40) if n % 10 in (2, 5, 7)], False),
    ):
        for index in chosen:
            share = logits_of(model, images, index)[[2, 5, 7]].softmax(0)
            scores.append(-float(share.max()))
            labels.append(is_strange)
    wanted = 100 * average_precision_score(labels, scores)
    assert report.metric == "AUPR (%)" and math.isclose(report.value, wanted, rel_tol=1e-4)
    # 6 strangers among 6 + 12.
    assert (report.images, report.clean_images) == (6, 12)
    assert math.isclose(report.chance, 100 / 3)


def test_the_published_sizes_have_their_published_chance() -> None:
    # 2,000 images of ImageNet-O among 200 classes of 50 validation images.
    assert math.isclose(average_precision(np.zeros(2000), np.zeros(10_000)), 1 / 6)


def test_a_limit_holds_for_both_kinds_of_images() -> None:
    model = seeded_model(lambda: Linear(10, 8))
    strange = random_images([0, 1, 2], classes=FOLDERS)
    clean = random_images([2] * 9, classes=CLASSES)
    config = ImageEvaluateConfig(limit=5)
    report = evaluate_shift(
        model, "imagenet-o", strange, PLAIN, config, classes=CLASSES, clean=clean
    )
    assert (report.images, report.clean_images) == (3, 5)


def test_the_statistics_mode_is_stated_and_only_one_is_taken() -> None:
    model = seeded_model(lambda: TinyMoE(BATCH_STATISTICS))
    shifted = random_images([0, 1, 2], classes=FOLDERS)
    config = ImageEvaluateConfig(statistics=("running",))
    report = evaluate_shift(model, "imagenet-r", shifted, PLAIN, config, classes=CLASSES)
    assert report.statistics == "running"
    both = replace(config, statistics=("running", "batch"))
    with pytest.raises(UserError, match="scored in one statistics mode"):
        evaluate_shift(model, "imagenet-r", shifted, PLAIN, both, classes=CLASSES)


def test_clean_images_belong_to_imagenet_o_alone() -> None:
    model = seeded_model(lambda: Linear(10, 8))
    shifted = random_images([0, 1], classes=FOLDERS)
    with pytest.raises(UserError, match="imagenet-o needs clean images"):
        evaluate_shift(model, "imagenet-o", shifted, PLAIN, classes=CLASSES)
    with pytest.raises(UserError, match="imagenet-a takes no clean images"):
        evaluate_shift(model, "imagenet-a", shifted, PLAIN, classes=CLASSES, clean=shifted)
    with pytest.raises(UserError, match="the model knows 10 classes, the images have 9"):
        evaluate_shift(model, "imagenet-a", shifted, PLAIN, classes=CLASSES[:9])
