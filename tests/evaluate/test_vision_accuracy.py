"""Accuracy counts what it says, states what it depends on, and leaves the model as it was."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from acmoe import AdaptiveConfig
from acmoe.config.images.data import ImageEvaluateConfig, parse_capacity
from acmoe.errors import UserError
from acmoe.evaluate.images.accuracy import count_hits, evaluate_images
from acmoe.evaluate.statistics import own_statistics
from acmoe.routing.state import Routing
from vision_cases import BATCH_STATISTICS, PLAIN, Linear, TinyMoE, random_images, seeded_model

LABELS = [n % 10 for n in range(37)]


@given(st.integers(1, 8), st.integers(2, 9), st.integers(0, 999), st.booleans())
def test_hits_are_those_of_a_stable_sort(count: int, classes: int, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 3, (count, classes)) if ties else rng.normal(size=(count, classes))
    labels = rng.integers(0, classes, count)
    order = np.argsort(-logits, axis=1, kind="stable")
    wanted = [sum(labels[i] in order[i, :k] for i in range(count)) for k in (1, 5)]
    found = count_hits(torch.from_numpy(logits).float(), torch.from_numpy(labels))
    assert [found.top1, found.top5] == wanted


def test_accuracy_and_loss_are_those_of_a_loop_over_images() -> None:
    model, images = seeded_model(lambda: Linear(10, 8)), random_images(LABELS)
    report = evaluate_images(model, images, PLAIN, ImageEvaluateConfig(batch=8))
    mean, std = (np.asarray(value) for value in PLAIN.normalization)
    weight, bias = model.head.weight.detach().double(), model.head.bias.detach().double()
    hits1 = hits5 = 0
    nats = []
    for index, label in enumerate(LABELS):
        x = torch.from_numpy((images.pixels(index) / 255 - mean) / std).permute(2, 0, 1)
        logits = weight @ x.flatten() + bias
        order = logits.argsort(descending=True).tolist()
        hits1 += order[0] == label
        hits5 += label in order[:5]
        nats.append(float(logits.logsumexp(0) - logits[label]))
    (figure,) = report.figures
    assert figure.top1 == 100 * hits1 / 37 and figure.top5 == 100 * hits5 / 37
    assert math.isclose(figure.loss, math.fsum(nats) / 37, rel_tol=1e-5)
    assert figure.statistics == "none" and figure.layers == ()


def test_a_report_states_what_it_depends_on_and_is_json() -> None:
    config = ImageEvaluateConfig(batch=5, order="stored", limit=12, seed=3, split="valid")
    model, told = seeded_model(lambda: Linear(10, 8)), []
    report = evaluate_images(
        model, random_images(LABELS), PLAIN, config, progress=lambda *news: told.append(news)
    )
    document = json.loads(json.dumps(report.to_json()))
    del document["figures"]
    assert document == {
        "data": "noise",
        "split": "valid",
        "images": 12,
        "classes": 10,
        "size": 8,
        "resize": 8,
        "batch": 5,
        "order": "stored",
        "seed": 3,
        "precision": "fp32",
        "capacity": None,
    }
    assert told == [("accuracy (none)", n, 3) for n in (1, 2, 3)]


def test_five_of_five_classes_are_no_figure() -> None:
    images = random_images([0, 1, 4], classes=tuple("abcde"))
    report = evaluate_images(seeded_model(lambda: Linear(5, 8)), images, PLAIN)
    assert report.figures[0].top5 is None


def test_batches_matter_where_statistics_are_the_batchs_and_nowhere_else() -> None:
    images = random_images(LABELS)
    losses = {}
    for mode in ("batch", "running"):
        config = AdaptiveConfig(statistics="batch", eval_statistics=mode)
        model = seeded_model(lambda: TinyMoE(config))  # noqa: B023
        for buffers in (layer.next_state.statistics for layer in model.layers):
            buffers.dispersion.uniform_(0.1, 2.0, generator=torch.Generator().manual_seed(1))
            buffers.weight.fill_(100.0)
        losses[mode] = [
            evaluate_images(model, images, PLAIN, ImageEvaluateConfig(batch=b)).figures[0].loss
            for b in (4, 37)
        ]
    assert math.isclose(*losses["running"], rel_tol=1e-6)
    assert not math.isclose(*losses["batch"], rel_tol=1e-6)


def test_every_statistics_mode_asked_for_is_a_figure_and_the_model_keeps_its_own() -> None:
    model = seeded_model(lambda: TinyMoE(BATCH_STATISTICS)).train()
    config = ImageEvaluateConfig(statistics=("running", "batch"), batch=16)
    figures = evaluate_images(model, random_images(LABELS), PLAIN, config).figures
    assert [figure.statistics for figure in figures] == ["running", "batch"]
    assert figures[0].loss != figures[1].loss
    assert model.training and own_statistics(model) == "batch"


def test_lifting_the_capacity_lets_every_token_through_for_a_while() -> None:
    images, tight = random_images(LABELS), seeded_model(lambda: TinyMoE("smoe", capacity=0.5))
    free = seeded_model(lambda: TinyMoE("smoe"))
    reports = [
        evaluate_images(model, images, PLAIN, ImageEvaluateConfig(**settings))
        for model, settings in (
            (tight, {"capacity": "model"}),
            (tight, {}),  # no token is dropped unless asked
            (free, {"capacity": "model"}),
            (free, {"capacity": 0.5}),
        )
    ]
    assert [report.capacity for report in reports] == [0.5, None, None, 0.5]
    limited, lifted, unlimited, set_to = (report.figures[0].loss for report in reports)
    assert limited != lifted == unlimited and set_to == limited
    assert [layer.capacity_factor for layer in tight.layers] == [0.5, 0.5]
    config = ImageEvaluateConfig(capacity=1.25)
    with pytest.raises(UserError, match=r"capacity=1.25: the model has no experts"):
        evaluate_images(seeded_model(lambda: Linear(10, 8)), images, PLAIN, config)


def test_dropless_is_the_old_spelling_of_the_capacity() -> None:
    for dropless, capacity in ((True, None), (False, "model")):
        with pytest.warns(FutureWarning, match=f"dropless={dropless} is now capacity={capacity!r}"):
            assert ImageEvaluateConfig(dropless=dropless) == ImageEvaluateConfig(capacity=capacity)
    assert [parse_capacity(text) for text in ("none", "model", "1.25")] == [None, "model", 1.25]
    for wrong in ("much", "0", "-1", "nan"):
        with pytest.raises(UserError, match="capacity="):
            parse_capacity(wrong)


def test_modes_are_refused_where_there_is_no_adaptive_router() -> None:
    model = seeded_model(lambda: TinyMoE("smoe"))
    config = ImageEvaluateConfig(statistics=("running",))
    with pytest.raises(UserError, match="statistics=running: the model has no adaptive router"):
        evaluate_images(model, random_images(LABELS), PLAIN, config)


def test_a_mode_that_the_model_cannot_take_is_refused_before_the_first_pass() -> None:
    model, passes = seeded_model(lambda: TinyMoE(BATCH_STATISTICS)), []
    config = ImageEvaluateConfig(statistics=("batch", "prefix"))
    with pytest.raises(UserError, match="statistics=prefix needs routers"):
        evaluate_images(
            model,
            random_images(LABELS),
            PLAIN,
            config,
            progress=lambda *stage: passes.append(stage),
        )
    assert passes == []


def test_routing_is_measured_where_asked() -> None:
    model = seeded_model(lambda: TinyMoE(BATCH_STATISTICS))
    config = ImageEvaluateConfig(routing=True, batch=16)
    (figure,) = evaluate_images(model, random_images(LABELS), PLAIN, config).figures
    first, second = figure.layers
    assert math.isclose(sum(first.load), 100) and len(first.load) == 4
    assert first.instability is None and 0 <= second.instability <= 1


def test_layers_are_compared_only_where_they_hold_the_same_tokens() -> None:
    from acmoe.evaluate.routing import StageTally

    def routing(tokens: int) -> Routing:
        affinity = torch.randn(tokens, 3)
        return Routing(
            affinity.argmax(1, keepdim=True), torch.ones(tokens, 1), affinity, affinity.sum()
        )

    tally = StageTally()
    for _ in range(2):
        tally.add([routing(8), routing(8), routing(2)])
    assert [layer.instability is None for layer in tally.layers()] == [True, False, True]


def test_a_model_of_other_classes_or_without_sense_is_refused() -> None:
    images = random_images(LABELS)
    with pytest.raises(UserError, match="the model knows 7 classes, the images have 10"):
        evaluate_images(seeded_model(lambda: Linear(7, 8)), images, PLAIN)

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 10), math.nan)

    with pytest.raises(UserError, match="logits are not all finite"):
        evaluate_images(Broken(), images, PLAIN)


def test_half_precision_is_near_the_full_one() -> None:
    model, images = seeded_model(lambda: TinyMoE("smoe")), random_images(LABELS)
    full, half = (
        evaluate_images(model, images, PLAIN, ImageEvaluateConfig(precision=p)).figures[0].loss
        for p in ("fp32", "bf16")
    )
    assert full != half and math.isclose(full, half, rel_tol=0.02)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"split": "train"}, "split='train'"),
        ({"statistics": ("all",)}, "statistics='all'"),
        ({"batch": 0}, "batch=0"),
        ({"order": "sorted"}, "order='sorted'"),
        ({"limit": 0}, "limit=0"),
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": "much"}, "capacity='much'"),
        ({"precision": "fp8"}, "precision='fp8'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        ImageEvaluateConfig(**settings)
