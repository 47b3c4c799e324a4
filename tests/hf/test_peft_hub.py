"""Adapters of PEFT in a repository of the hub, here in its cache: their statistics come along."""

import json
import logging
from pathlib import Path

import huggingface_hub
import pytest
import torch
from attached import logits, measured, statistics
from small_models import build, inputs

import acmoe
import acmoe.hf
from acmoe.hf.checkpoints import adapters
from acmoe.hf.checkpoints.statistics import FILE

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


@pytest.mark.parametrize("lacks", [False, True])
def test_without_the_hub_it_is_said_that_statistics_may_be_missing(
    hub: dict[str, object], caplog: pytest.LogCaptureFixture, lacks: bool
) -> None:
    """The cache has the adapter alone, and may note that the hub has no statistics for it."""
    (snapshot_of(hub) / FILE).unlink()
    if lacks:
        noted = snapshot_of(hub).parents[1] / ".no_exist" / COMMIT / FILE
        noted.parent.mkdir(parents=True)
        noted.touch()
    with caplog.at_level(logging.WARNING, "acmoe"):
        model = peft.PeftModel.from_pretrained(attached(), REPOSITORY, **hub)
    assert all(not one.weight.any() for one in statistics(model))
    said = "the statistics of someone/adapter were not loaded: the hub does not answer"
    assert (said in caplog.text) == (not lacks)
    assert bool(caplog.text) == (not lacks)


def test_from_pretrained_of_an_adapter_reads_the_statistics_of_the_same_revision(
    hub: dict[str, object], tmp_path: Path
) -> None:
    """transformers passes revision, cache and subfolder by its own config; main has no files."""
    attached().save_pretrained(tmp_path / "base")
    refs = snapshot_of(hub).parents[1] / "refs"
    (refs / "main").rename(refs / "tuned")
    settings = snapshot_of(hub) / "adapter_config.json"
    adapter = {
        **json.loads(settings.read_text()),
        "base_model_name_or_path": str(tmp_path / "base"),
    }
    settings.write_text(json.dumps(adapter))
    loaded = type(attached()).from_pretrained(REPOSITORY, revision="tuned", **hub).eval()
    expected = peft.PeftModel.from_pretrained(attached(), snapshot_of(hub)).eval()
    assert torch.equal(logits(loaded, **X), logits(expected, **X))


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
        raise OSError("the repository is gated")

    monkeypatch.setattr(adapters, "cached_file", unreachable)
    with caplog.at_level(logging.WARNING, "acmoe"):
        peft.PeftModel.from_pretrained(attached(), REPOSITORY, **hub)
    assert "the statistics of someone/adapter were not loaded: the repository is" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "acmoe"):
        peft.PeftModel.from_pretrained(build("mixtral"), REPOSITORY, **hub)
    assert not caplog.text
