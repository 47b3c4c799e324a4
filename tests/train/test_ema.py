"""The moving average of weights: its values, its place in checkpoints, and what it leaves alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from acmoe.config.images.attack import attack_config
from acmoe.config.images.data import ImageEvaluateConfig
from acmoe.data.images.load import load_images
from acmoe.errors import UserError
from acmoe.evaluate.images.run import attack_image_run, evaluate_image_run
from acmoe.evaluate.run import open_image_run
from acmoe.train.images import ImageTrainer
from tiny_vision_runs import tiny_vision_run, trained_images, vision_records

DECAY = 0.8


def trainer_of(*overrides: str, **options: bool) -> ImageTrainer:
    config = tiny_vision_run(f"ema={DECAY}", *overrides, **options)  # type: ignore[arg-type]
    torch.manual_seed(config.seed)
    return ImageTrainer(config, load_images(config.data), torch.device("cpu"))


def test_the_average_is_that_of_a_float64_loop_and_training_does_not_see_it() -> None:
    trainer, plain = trainer_of(), trainer_of()
    plain.average = None
    wanted = {name: p.detach().double() for name, p in trainer.model.named_parameters()}
    for step in range(1, 4):
        for one in (trainer, plain):
            torch.manual_seed(step)
            one.update(step, record=False)
        for name, parameter in trainer.model.named_parameters():
            wanted[name] = DECAY * wanted[name] + (1 - DECAY) * parameter.detach().double()
    assert trainer.average is not None
    for name, average in zip(trainer.average.names, trainer.average.average, strict=True):
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), wanted[name], rtol=1e-6, atol=1e-7)
    for left, right in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(left, right)
    for one in (trainer, plain):
        one.close()


def test_validation_scores_the_average_and_puts_the_weights_back() -> None:
    trainer = trainer_of()
    for step in (1, 2, 3):
        trainer.update(step, record=False)
    assert trainer.average is not None
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    score = trainer.validate()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert score.ema_loss is not None and score.ema_loss != score.loss
    for weight, average in zip(trainer.average.weights, trainer.average.average, strict=True):
        weight.data.copy_(average)
    assert trainer.validate().loss == score.ema_loss
    trainer.close()


def test_the_averaged_model_is_saved_beside_the_weights(tmp_path: Path) -> None:
    folder = trained_images(tiny_vision_run(f"ema={DECAY}", "steps=4"), tmp_path / "run")
    run = open_image_run(folder)
    own, averaged = run.model("last"), run.model("last", ema=True)
    parameters = dict(own.named_parameters())
    state, other = own.state_dict(), averaged.state_dict()
    assert state.keys() == other.keys()
    for name, value in state.items():
        # Buffers, here the running statistics, are the latest; every parameter lags behind.
        assert torch.equal(value, other[name]) == (name not in parameters), name
    assert any("dispersion" in name for name in state)
    valid = [line for line in vision_records(folder) if line["kind"] == "valid"]
    assert valid[-1]["ema_top1"] is not None and valid[-1]["ema_loss"] != valid[-1]["loss"]
    scored = ImageEvaluateConfig(split="valid", limit=40)
    for ema, key in ((False, "loss"), (True, "ema_loss")):
        found = evaluate_image_run(run, scored, which="last", ema=ema, device="cpu")
        assert found.report.figures[0].loss == pytest.approx(valid[-1][key], rel=1e-6)
        assert found.to_json().get("ema", False) == ema
    attack = replace(attack_config("fgsm"), limit=8, batch=8)
    files = {attack_image_run(run, attack, ema=ema, device="cpu").path for ema in (False, True)}
    assert len(files) == 2 and all(path.is_file() for path in files)


def test_a_run_without_an_average_says_so(tmp_path: Path) -> None:
    folder = trained_images(tiny_vision_run("steps=1", router="smoe"), tmp_path / "run")
    with pytest.raises(UserError, match=r"keeps no moving average .* train with ema=0.99996"):
        open_image_run(folder).model(ema=True)
    for decay in (1.0, -0.1):
        with pytest.raises(UserError, match=rf"ema={decay}; a decay lies in \[0, 1\)"):
            tiny_vision_run(f"ema={decay}")
