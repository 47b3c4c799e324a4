"""Transformers without acmoe, and its plain classes, refuse the checkpoint of an attached model."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attached import measured
from small_models import build
from transformers import AutoModelForCausalLM, MixtralForCausalLM

import acmoe
from acmoe.hf import adaptive_class
from acmoe.hf.checkpoints import auto, plain_load


def test_transformers_alone_refuses_the_checkpoint(tmp_path: Path, monkeypatch) -> None:
    measured().save_pretrained(tmp_path)
    monkeypatch.setattr(auto.CONFIGS, "_extra_content", {})
    with pytest.raises(ValueError, match="has model type `acmoe_mixtral` but Transformers does no"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_plain_class_refuses_the_checkpoint_and_says_how_to_load_it(tmp_path: Path) -> None:
    model = measured()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`import acmoe\.hf`.*acmoe\.hf\.AdaptiveMixtralForCaus"):
        MixtralForCausalLM.from_pretrained(tmp_path)
    options = {"experts_implementation": "eager", "attn_implementation": "eager"}
    with pytest.raises(ValueError, match=r"`import acmoe\.hf`.*acmoe\.hf\.AdaptiveMixtralForCaus"):
        MixtralForCausalLM.from_pretrained(tmp_path, **options)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    assert loaded.config._experts_implementation == "eager"
    acmoe.detach(loaded).save_pretrained(tmp_path / "plain")
    plain = MixtralForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)


class OwnMixtral(MixtralForCausalLM):
    """A class that is not in transformers, nor in any Auto class."""


def test_a_class_of_ones_own_refuses_the_checkpoint_and_names_a_way_that_works(tmp_path) -> None:
    model = acmoe.attach(OwnMixtral(build("mixtral").config))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"or by acmoe\.hf\.adaptive_class\(OwnMixtral\)"):
        OwnMixtral.from_pretrained(tmp_path)
    loaded = adaptive_class(OwnMixtral).from_pretrained(tmp_path)
    assert isinstance(loaded, OwnMixtral)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_plain_class_refuses_a_part_of_the_checkpoint(tmp_path: Path) -> None:
    acmoe.attach(build("qwen3_vl_moe.whole")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"an adaptive model: `import acmoe\.hf`"):
        transformers.Qwen3VLMoeTextModel.from_pretrained(tmp_path, experts_implementation="eager")


@pytest.mark.parametrize("kind", [MixtralForCausalLM, AutoModelForCausalLM])
def test_a_plain_config_for_the_checkpoint_is_warned_of(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a config of the caller's, transformers never reads the one that refuses."""
    config = build("mixtral").config
    model = measured()
    model.save_pretrained(tmp_path / "adaptive")
    with caplog.at_level(logging.WARNING, "acmoe"):
        plain = kind.from_pretrained(tmp_path / "adaptive", config=config)
    assert type(plain) is MixtralForCausalLM
    assert "its checkpoint was saved with adaptive ones" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "acmoe"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "adaptive")
        acmoe.detach(model).save_pretrained(tmp_path / "plain")
        kind.from_pretrained(tmp_path / "plain", config=config)
    assert "adaptive ones" not in caplog.text


def test_a_body_that_was_attached_alone_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The config of the whole model is then a plain one."""
    model = build("mixtral")
    acmoe.attach(model.model)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "acmoe"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "its checkpoint was saved with adaptive ones" in caplog.text


def test_a_loading_method_with_other_arguments_is_left_alone() -> None:
    """The method is private to transformers, and every model calls it."""
    followed = plain_load._warning(lambda self, *keys, strict: (self, keys, strict))
    assert followed("model", ["a"], "b", strict=True) == ("model", (["a"], "b"), True)
