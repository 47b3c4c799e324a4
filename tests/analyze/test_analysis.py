"""An analysis of hand-made records by hand, and of real tiny runs."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from acmoe.analyze import analysis as analysis_module
from acmoe.analyze.analysis import Analysis, analyze
from acmoe.analyze.reading import read
from acmoe.analyze.record import LayerRecord, RoutingRecord
from acmoe.analyze.sampling import AnalyzeConfig, Disturbed, Sampled, sample_run
from acmoe.config.images.attack import attack_config
from acmoe.config.text.data import ContaminationConfig
from acmoe.errors import UserError
from acmoe.evaluate.images.attack import evaluate_attack
from acmoe.evaluate.run import open_image_run
from tiny_runs import byte_corpus, tiny_run, trained


def layer(first: list[int], *, cluster: list[int] | None = None, scale: Tensor) -> LayerRecord:
    """Four tokens on a line, two experts; `scale` (C, D) is what each cluster was read in."""
    input_ND = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    cluster_N = torch.tensor(cluster or [-1] * 4)
    read_ND = torch.where((cluster_N >= 0)[:, None], scale[cluster_N.clamp(min=0)], 1.0)
    affinity_NE = torch.nn.functional.one_hot(torch.tensor(first), 2).float()
    return LayerRecord(
        input=input_ND,
        scaled=input_ND * read_ND,
        affinity=affinity_NE,
        expert_ids=affinity_NE.topk(1).indices,
        gate=torch.ones(4, 1),
        cluster=cluster_N,
        scale=scale,
        scale_varies=False,
        adaptive=cluster is not None,
        grid=None,
    )


def record(last: list[int], scale: Tensor, *, loss: float, statistics: str) -> RoutingRecord:
    ones = torch.ones(2, 1)
    return RoutingRecord(
        kind="tokens",
        layers=(layer([0, 0, 1, 1], scale=ones), layer(last, cluster=[0, 0, 1, 1], scale=scale)),
        token_ids=torch.arange(4),
        pixels=None,
        labels=None,
        predicted=None,
        loss=loss,
        statistics=statistics,
        batch=1,
        block=4,
        sample="four tokens",
    )


@pytest.fixture
def by_hand() -> Analysis:
    running = record([0, 0, 1, 0], torch.tensor([[2.0], [0.5]]), loss=1.0, statistics="running")
    batch = record([0, 1, 1, 0], torch.tensor([[4.0], [0.5]]), loss=1.25, statistics="batch")
    changed = record([1, 0, 1, 0], torch.tensor([[2.0], [0.5]]), loss=3.0, statistics="running")
    touched = torch.tensor([True, False, False, False])
    return analyze(
        Sampled(
            run=cast(Any, None),
            step=7,
            own=running,
            compared={"running": running, "batch": batch},
            disturbed=Disturbed(record=changed, how="one of four replaced", touched=touched),
        )
    )


def test_the_gap_between_statistics_by_hand(by_hand: Analysis) -> None:
    # log M differs by log 2 for one cluster of two, and one token of four chooses another expert.
    assert by_hand.layers[0].gap is None
    gap = by_hand.layers[1].gap
    assert gap is not None
    assert gap.log_scale_rms == pytest.approx(math.log(2) / math.sqrt(2))
    assert gap.moved == 0.25
    assert by_hand.gap_loss == 0.25


def test_overlap_with_the_disturbed_sample_by_hand(by_hand: Analysis) -> None:
    # One token of four has another expert, and that one was replaced itself.
    found = by_hand.layers[1].disturbed
    assert found is not None
    assert (found.overlap, found.untouched, found.moved) == (0.75, 1.0, 0.25)


def test_instability_against_the_layer_before_by_hand(by_hand: Analysis) -> None:
    # {0 1} {2 3} becomes {0 1 3} {2}. Of 6 pairs, 23 parts, 03 and 13 meet: 3 change.
    assert by_hand.layers[0].change is None
    change = by_hand.layers[1].change
    assert change is not None
    assert change.instability == 0.5
    assert by_hand.instability is not None
    assert by_hand.instability.mean == 0.5


def test_a_plain_layer_has_one_space_and_no_scale(by_hand: Analysis) -> None:
    first, second = by_hand.layers
    assert first.scale is None
    assert first.scaled == first.plain
    assert second.scale is not None
    assert second.scale.rms_log == pytest.approx(math.log(2))
    # Plain: clusters {1 2} {3 4} leave 1 of 5 inside; as read {2 4} {1.5 2}: 2.125 of 3.6875.
    assert second.plain.by_cluster.within_share == pytest.approx(1 / 5)
    assert second.scaled.by_cluster.within_share == pytest.approx(2.125 / 3.6875)
    # Sums of squares 30 of 30; one feature has condition number 1.
    assert second.plain.conditioning == (1.0, 1)


def test_the_reading_says_what_was_found(by_hand: Analysis) -> None:
    text = "\n".join(read(by_hand))
    assert "factor of 2.00" in text
    assert "25.0% of tokens choose another expert first, the loss differs by +0.2500" in text
    # Layer 1 keeps all experts, layer 2 three of four: 87.5% on average.
    assert "one of four replaced: 87.5% of a token's experts stay, 100.0%" in text


def test_without_scikit_learn_everything_but_silhouettes_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(analysis_module, "find_spec", lambda name: None)
    own = record([0, 0, 1, 0], torch.tensor([[2.0], [0.5]]), loss=1.0, statistics="running")
    found = analyze(Sampled(run=cast(Any, None), step=1, own=own, compared={}, disturbed=None))
    assert found.layers[1].plain.by_cluster.silhouette is None
    assert found.layers[1].plain.by_cluster.within_share is not None
    assert any("pip install" in sentence for sentence in read(found))


def test_a_text_run_is_sampled_in_both_statistics_and_contaminated(text_run: Path) -> None:
    config = AnalyzeConfig(tokens=300, contamination=ContaminationConfig(rate=0.2), device="cpu")
    sampled = sample_run(text_run, config)
    assert sampled.own.statistics == "running"
    assert sampled.compared["running"] is sampled.own
    assert sampled.compared["batch"].statistics == "batch"
    assert sampled.disturbed is not None
    touched_N, record = sampled.disturbed.touched, sampled.disturbed.record
    assert touched_N is not None
    assert record.token_ids is not None
    assert sampled.own.token_ids is not None
    assert torch.equal(touched_N, record.token_ids != sampled.own.token_ids)
    assert 0.1 < float(touched_N.double().mean()) < 0.3
    found = analyze(sampled)
    assert all(0 <= one.disturbed.overlap < 1 for one in found.layers if one.disturbed)
    assert found.gap_loss == sampled.compared["batch"].loss - sampled.own.loss
    assert json.loads(json.dumps(found.to_json()))["layers"][1]["change"]["chance"] > 0


def test_attacked_images_are_those_of_the_attack_command(image_run: Path) -> None:
    attack = attack_config("pgd", eps=(8 / 255,))
    config = AnalyzeConfig(images=64, attack=attack, device="cpu")
    sampled = sample_run(image_run, config)
    assert sampled.disturbed is not None
    clean, attacked = sampled.own, sampled.disturbed.record
    assert clean.pixels is not None
    assert attacked.pixels is not None
    assert float((attacked.pixels - clean.pixels).abs().max()) <= 8 / 255 + 1e-5
    run = open_image_run(image_run)
    report = evaluate_attack(
        run.model(),
        run.images()["test"],
        run.config.data,
        replace(attack, limit=64),
        device="cpu",
    )
    assert attacked.predicted is not None
    assert attacked.labels is not None
    hits = 100 * float((attacked.predicted == attacked.labels).double().mean())
    assert hits == pytest.approx(report.figures[0].top1)
    found = [one.disturbed for one in analyze(sampled).layers]
    moved = [100 * one.moved for one in found if one is not None]
    assert moved == pytest.approx(list(report.figures[0].moved))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"images": 4}, "images=4 does not apply"),
        ({"attack": attack_config("fgsm")}, "attack=fgsm does not apply"),
        ({"tokens": 3}, "tokens=3 do not fill batch=8"),
    ],
)
def test_what_is_for_images_is_refused_for_text(
    text_run: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        sample_run(text_run, AnalyzeConfig(device="cpu", **options))


def test_what_is_for_text_is_refused_for_images(image_run: Path) -> None:
    with pytest.raises(UserError, match="tokens=100 does not apply"):
        sample_run(image_run, AnalyzeConfig(tokens=100, device="cpu"))


def test_statistics_of_a_model_without_any_are_refused(tmp_path: Path) -> None:
    folder = trained(tiny_run(byte_corpus(tmp_path), "steps=1", router="smoe"), tmp_path / "run")
    with pytest.raises(UserError, match="no adaptive router"):
        sample_run(folder, AnalyzeConfig(tokens=64, statistics="batch", device="cpu"))
    assert sample_run(folder, AnalyzeConfig(tokens=64, device="cpu")).compared == {}
