"""Adapters of PEFT in a repository of the hub, here in its cache: their statistics come along."""

import logging
from pathlib import Path

import huggingface_hub
import pytest
import torch
from attached import logits, measured
from small_models import build, inputs

import acmoe
import acmoe.hf
from acmoe.hf.checkpoints import adapters

peft = pytest.importorskip("peft", reason="needs peft: pip install peft")

X = inputs("mixtral", 4, 24)
REPOSITORY = "someone/adapter"
COMMIT = "0" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The options that find an adapter with statistics in a cache of the hub, without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    root = tmp_path / "models--someone--adapter"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    snapshot = root / "snapshots" / COMMIT
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    peft.get_peft_model(measured(), config).save_pretrained(snapshot)
    return {"cache_dir": str(tmp_path)}


def snapshot_of(hub: dict[str, object]) -> Path:
    return Path(str(hub["cache_dir"]), "models--someone--adapter", "snapshots", COMMIT)


def attached() -> torch.nn.Module:
    return acmoe.attach(build("mixtral"), acmoe.AdaptiveConfig(momentum=0.5))


def test_an_adapter_of_the_hub_brings_its_statistics(hub: dict[str, object]) -> None:
    expected = peft.PeftModel.from_pretrained(attached(), snapshot_of(hub)).eval()
    loaded = peft.PeftModel.from_pretrained(attached(), REPOSITORY, **hub).eval()
    assert torch.equal(logits(loaded, **X), logits(expected, **X))
    (snapshot_of(hub) / "acmoe_statistics.safetensors").unlink()
    without = peft.PeftModel.from_pretrained(attached(), REPOSITORY, **hub).eval()
    assert not torch.equal(logits(without, **X), logits(expected, **X))


def test_a_plain_model_is_warned_of_an_adapter_of_the_hub(
    hub: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "acmoe"):
        peft.PeftModel.from_pretrained(build("mixtral"), REPOSITORY, **hub)
    assert "was trained with adaptive routers, and the model has plain ones" in caplog.text


def test_statistics_that_cannot_be_downloaded_are_warned_of(
    hub: dict[str, object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: object, **options: object) -> None:
        raise OSError("the hub does not answer")

    monkeypatch.setattr(adapters, "cached_file", unreachable)
    with caplog.at_level(logging.WARNING, "acmoe"):
        peft.PeftModel.from_pretrained(attached(), REPOSITORY, **hub)
    assert "the statistics of someone/adapter were not loaded: the hub does not" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "acmoe"):
        peft.PeftModel.from_pretrained(build("mixtral"), REPOSITORY, **hub)
    assert not caplog.text
