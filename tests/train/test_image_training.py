"""Training image classifiers: one update, the whole run, and the run that was interrupted."""

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_updates import statistics_updated
from interrupted_updates import stop_at
from started import fork_server
from torch.nn import functional

from acmoe.config.images.data import AugmentConfig
from acmoe.config.images.train import VisionRunConfig
from acmoe.data.images.load import load_images
from acmoe.evaluate.run import open_image_run
from acmoe.evaluate.statistics import own_statistics
from acmoe.train.health import TrainingStopped
from acmoe.train.images import ImageTrainer, ImageValidation, decays
from acmoe.train.metrics_log import ImageMetricsLog
from acmoe.train.run import train_images
from tiny_vision_runs import (
    QUIET,
    all_numbers,
    tiny_vision_run,
    train_images_in_child,
    trained_images,
    vision_records,
)

FORKS = fork_server()


def trainer_of(config: VisionRunConfig) -> ImageTrainer:
    torch.manual_seed(config.seed)
    return ImageTrainer(config, load_images(config.data), torch.device("cpu"))


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        # Batch statistics, drop path, expert dropout, noise of the gate.
        pytest.param((), {}, marks=pytest.mark.slow),
        pytest.param(
            ("model.router.statistics=running", "schedule=constant"), {}, marks=pytest.mark.slow
        ),
        pytest.param((), {"router": "smoe"}, marks=pytest.mark.slow),
        pytest.param((), {"router": "random"}, marks=pytest.mark.slow),  # draws in every call
        # DeiT's additions: averaged weights, and every image three times.
        (("ema=0.9", "augment.repeats=3"), {"soft": True}),
        pytest.param(
            ("data.on_device=true", "augment.crop=0.5,1.0"),
            {"router": "smoe"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adaptive", "running", "smoe", "random", "softmoe", "on-device"],
)
def test_stopped_at_5_and_continued_equals_12_steps_in_one_run(
    overrides: tuple[str, ...],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_vision_run(*overrides, **options)
    trained_images(config, tmp_path / "whole")
    stop_at(ImageTrainer, [5], monkeypatch)
    first = train_images(config, tmp_path / "parts", console=QUIET)
    assert (first.step, first.signal) == (5, signal.SIGTERM)
    assert "same command" in first.message
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6}\n{"kind": "tra')  # as a killed process leaves it
    second = train_images(config, tmp_path / "parts", console=QUIET)
    assert (second.step, second.signal) == (12, None)
    assert all_numbers(tmp_path / "whole") == all_numbers(tmp_path / "parts")
    assert vision_records(tmp_path / "whole") == vision_records(tmp_path / "parts")


@pytest.mark.slow
def test_killed_in_the_middle_the_averaged_weights_continue_bit_by_bit(tmp_path: Path) -> None:
    config = tiny_vision_run("ema=0.9", "augment.repeats=3", "steps=40", "checkpoint_every=2")
    trained_images(config, tmp_path / "whole")
    checkpoints, deadline = tmp_path / "killed" / "checkpoints", time.monotonic() + 60
    for wanted in (3, 9, 17):
        process = FORKS.Process(target=train_images_in_child, args=(config, tmp_path / "killed"))
        process.start()
        while max([0, *(int(one.name[5:]) for one in checkpoints.glob("step-*"))]) < wanted:
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
        process.join()
        for folder in checkpoints.glob("step-*"):
            assert {file.name.split("-")[0] for file in (folder / "ema").iterdir()} == {
                "config.json",
                "weights",
            }
    trained_images(config, tmp_path / "killed")
    assert all_numbers(tmp_path / "killed") == all_numbers(tmp_path / "whole")
    assert vision_records(tmp_path / "killed") == vision_records(tmp_path / "whole")


@pytest.mark.slow  # test_resume.py has the same for text
def test_sigterm_finishes_the_step_saves_and_exits_with_143(tmp_path: Path) -> None:
    config = tiny_vision_run("steps=100000", "checkpoint_every=100000", "eval_every=100000")
    process = FORKS.Process(target=train_images_in_child, args=(config, tmp_path / "run"))
    process.start()
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.is_file() and metrics.read_text()):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    process.terminate()
    process.join(60)
    assert process.exitcode == 143
    # Only the signal can have saved this: no checkpoint was due.
    assert 4 <= open_image_run(tmp_path / "run").step("last") < 100000


def test_a_run_folder_holds_metrics_and_a_config_of_its_kind(tmp_path: Path) -> None:
    config = tiny_vision_run()
    folder = trained_images(config, tmp_path / "run")
    assert [(line["kind"], line["step"]) for line in vision_records(folder)] == [
        ("train", 4),
        ("valid", 6),
        ("train", 8),
        ("train", 12),
        ("valid", 12),
    ]
    line = vision_records(folder)[0]
    assert len(line["load_balance"]) == 3  # two MoE layers in the first stage, one in the second
    valid = vision_records(folder)[-1]
    assert (valid["images"], valid["statistics"], valid["batch"]) == (40, "running", 64)
    assert 0 <= valid["top1"] <= valid["top5"] <= 100
    document = json.loads((folder / "config.json").read_text())
    assert document["kind"] == "swin-run"
    assert open_image_run(folder).config == config


def test_the_loss_is_the_models_on_the_altered_batch() -> None:
    quiet = ("model.expert_dropout=0", "model.drop_path=0", "split=1", "augment.mixup=0")
    trainer = trainer_of(
        tiny_vision_run(*quiet, "augment.cutmix=0", "augment.erase=0", router="smoe")
    )
    other = trainer_of(trainer.config)
    batch = next(other.batches)
    x, targets_BK = other.augment(batch.images, batch.labels, seed=batch.seed)
    assert targets_BK.shape == (16, 10)
    torch.manual_seed(7)  # of the gate's noise
    logits_BK = other.model(x).logits.double()
    expected = functional.cross_entropy(logits_BK, targets_BK.double())
    torch.manual_seed(7)
    update = trainer.update(1, record=True)
    assert update.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert update.aux_loss > 0
    # 16 images of 4 x 4 tokens, then of 2 x 2, each at two experts.
    assert [int(load.sum()) for load in update.loads] == [512, 512, 128]
    for closing in (trainer, other):
        closing.close()


def test_the_auxiliary_loss_is_part_of_what_is_minimised() -> None:
    gates = []
    for balance in (0, 1):
        trainer = trainer_of(tiny_vision_run(f"model.balance={balance}", router="smoe"))
        trainer.update(1, record=False)
        trainer.close()
        gates.append(trainer.model.moe_layers()[0].router.embedding.detach().clone())
    assert not torch.equal(*gates)


def test_statistics_are_folded_in_once_per_update(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tiny_vision_run("split=4"))
    updated = statistics_updated(trainer, monkeypatch)
    trainer.close()
    assert len(updated) == 1  # of the two MoE layers in the adaptive stage the first measures
    assert updated[0].weight.sum() > 0
    assert own_statistics(trainer.model) == "running"


def test_validation_leaves_training_as_it_was() -> None:
    trainer, alone = (trainer_of(tiny_vision_run()) for _ in range(2))
    torch.manual_seed(1)
    trainer.update(1, record=False)
    trainer.validate()
    after = trainer.update(2, record=False)
    torch.manual_seed(1)
    alone.update(1, record=False)
    assert torch.equal(after.loss, alone.update(2, record=False).loss)
    assert trainer.model.training
    for closing in (trainer, alone):
        closing.close()


def test_biases_gains_and_positions_do_not_decay() -> None:
    swin, soft = (trainer_of(tiny_vision_run(soft=soft)) for soft in (False, True))
    parameters = dict(swin.model.named_parameters()) | dict(soft.model.named_parameters())
    kept = {name for name, parameter in parameters.items() if not decays(name, parameter)}
    for name in (
        "stages.0.blocks.0.attention.position.up.weight",  # a matrix, but of positions
        "stages.0.blocks.1.layer.experts.up_bias",  # a matrix, but one bias for each expert
        "stages.0.blocks.0.norm_layer.weight",
        "head.bias",
        "positions",
        "class_token",
    ):
        assert name in kept, name
    for name in ("stages.0.blocks.1.layer.experts.up", "head.weight"):
        assert name not in kept, name
    decaying, others = swin.optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.05, 0.0)
    for closing in (swin, soft):
        closing.close()


def test_a_length_in_epochs_is_counted_in_whole_batches() -> None:
    # 1,257 training digits (1,797 less 15 % of each class, twice) make 78 batches of 16.
    trainer = trainer_of(tiny_vision_run("epochs=2.5", "warmup=0.5"))
    trainer.close()
    per_pass = len(trainer.images.train) // 16
    assert (trainer.schedule.steps, trainer.schedule.warmup) == (
        round(2.5 * per_pass),
        round(0.5 * per_pass),
    )
    assert trainer.learning_rate(trainer.schedule.warmup) == pytest.approx(3e-3)
    assert trainer.learning_rate(trainer.schedule.steps) == pytest.approx(0, abs=1e-12)


def test_the_best_checkpoint_has_the_highest_accuracy_then_the_lowest_loss(tmp_path: Path) -> None:
    log = ImageMetricsLog(tmp_path, "validation top-1 (%)")
    log.open(0)
    for step, top1, loss in ((1, 50.0, 1.0), (2, 60.0, 2.0), (3, 55.0, 0.5), (4, 60.0, 1.5)):
        log.valid_record(step, ImageValidation(loss, top1, None, 10, "none", 2))
    assert (log.best_step, log.best_value) == (4, 60.0)


def test_a_diverging_run_names_step_and_layer(tmp_path: Path) -> None:
    config = tiny_vision_run("lr=1e30", "clip=none", "checkpoint_every=1", router="smoe")
    config = replace(config, augment=AugmentConfig())
    with pytest.raises(TrainingStopped, match=r"step 2 gave .* first gives .*step-00000001"):
        train_images(config, tmp_path / "run", console=QUIET)
