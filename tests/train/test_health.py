"""A loss that is no number stops the run and says where it came from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from acmoe.config.text.train import RunConfig
from acmoe.evaluate.run import open_corpus, open_run
from acmoe.train.checkpoint import first_nonfinite
from acmoe.train.health import TrainingStopped, training_stopped
from acmoe.train.run import train
from acmoe.train.text import TextTrainer
from tiny_runs import QUIET, byte_corpus, everything, tiny_run


def trainer_of(config: RunConfig) -> TextTrainer:
    trainer = TextTrainer(config, open_corpus(config.data), torch.device("cpu"))
    trainer.update(1, record=False)
    return trainer


def test_a_diverging_run_names_step_layer_and_the_last_good_checkpoint(tmp_path: Path) -> None:
    # The first update makes every weight about 2e29 (lr / warmup): embedding times query overflows.
    bad = tiny_run(byte_corpus(tmp_path), "lr=1e30", "checkpoint_every=1", "log_every=10")
    with pytest.raises(TrainingStopped) as stop:
        train(bad, tmp_path / "bad", console=QUIET)
    message = str(stop.value)
    assert "step 2 gave a loss or gradient that is not finite" in message
    assert "blocks.0.attention.query (Linear) first gives" in message
    assert f"the last good checkpoint is {tmp_path / 'bad' / 'checkpoints' / 'step-00000001'}" in (
        message
    )
    assert "\n" not in message
    assert open_run(tmp_path / "bad").checkpoint("last").name == "step-00000001"


def test_the_bad_step_is_found_though_the_host_looks_only_every_tenth(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "lr=1e30", "checkpoint_every=20", "log_every=10")
    with pytest.raises(TrainingStopped, match=r"step 2 gave .* no checkpoint was written"):
        train(config, tmp_path / "run", console=QUIET)


def test_weights_stay_those_that_gave_the_first_bad_loss(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_run(byte_corpus(tmp_path)))
    with torch.no_grad():
        trainer.model.blocks[1].attention.key.weight.fill_(1e38)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    assert not trainer.update(2, record=False).loss.isfinite()
    trainer.update(3, record=False)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_the_first_layer_that_overflows_is_named(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_run(byte_corpus(tmp_path)))
    with torch.no_grad():
        trainer.model.blocks[1].attention.key.weight.fill_(1e38)  # 16 features of about 1 each
    assert first_nonfinite(trainer.model.state_dict()) is None
    stop = training_stopped(trainer, step=1, bad=0, good=None)
    assert "blocks.1.attention.key (Linear) first gives" in str(stop)


def test_a_parameter_that_is_not_finite_is_named(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_run(byte_corpus(tmp_path)))
    with torch.no_grad():
        trainer.model.blocks[2].norm_layer.weight[3] = torch.nan
    stop = training_stopped(trainer, step=1, bad=0, good=None)
    assert "blocks.2.norm_layer.weight holds nan" in str(stop)


def test_a_gradient_that_is_not_finite_stops_a_clipped_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = TextTrainer.__init__

    def with_a_bad_gradient(self: TextTrainer, *arguments: Any) -> None:
        build(self, *arguments)
        calls: list[None] = []

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            return gradient * torch.inf if len(calls) == 5 else gradient  # two a step: the third

        self.model.unembed.weight.register_hook(hook)

    monkeypatch.setattr(TextTrainer, "__init__", with_a_bad_gradient)
    config = tiny_run(byte_corpus(tmp_path), "clip=1.0", "checkpoint_every=2")
    with pytest.raises(TrainingStopped, match=r"step 3 gave .* or its gradient does not"):
        train(config, tmp_path / "run", console=QUIET)
    assert open_run(tmp_path / "run").checkpoint("last").name == "step-00000002"


def test_a_stopped_run_continued_meets_the_same_end(tmp_path: Path) -> None:
    bad = tiny_run(byte_corpus(tmp_path), "lr=1e30", "checkpoint_every=1")
    with pytest.raises(TrainingStopped, match="step 2 gave"):
        train(bad, tmp_path / "bad", console=QUIET)
    saved = everything(tmp_path / "bad")
    with pytest.raises(TrainingStopped, match="step 2 gave"):
        train(bad, tmp_path / "bad", console=QUIET)
    assert everything(tmp_path / "bad") == saved


def test_a_validation_that_is_not_finite_stops_the_run_with_step_and_layer(tmp_path: Path) -> None:
    # Only the validation reads the weights after the first update, of about 2e29.
    config = tiny_run(byte_corpus(tmp_path), "lr=1e30", "eval_every=1", "checkpoint_every=20")
    with pytest.raises(TrainingStopped) as stop:
        train(config, tmp_path / "run", console=QUIET)
    message = str(stop.value)
    assert "the validation after step 1 cannot be scored, the loss of batch 1 of" in message
    assert "blocks.0.attention.query (Linear) first gives" in message
    assert "no checkpoint was written before" in message and "\n" not in message
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert not [line for line in records if '"valid"' in line]


def test_a_learning_rate_of_a_million_stops_with_step_and_layer(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "lr=1e6", "warmup=0", "clip=1.0")
    with pytest.raises(TrainingStopped) as stop:
        train(config, tmp_path / "run", console=QUIET)
    print(stop.value)
    assert "step " in str(stop.value) and "lower lr than 1000000.0" in str(stop.value)
    for record in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert "null" not in record
