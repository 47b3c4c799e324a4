"""Transformers without acmoe, and its plain classes, refuse the checkpoint of an attached model."""

from pathlib import Path

import pytest
import torch
import transformers
from attached import measured
from small_models import build
from transformers import AutoModelForCausalLM, MixtralForCausalLM

import acmoe
from acmoe.hf.checkpoints import auto


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


def test_a_plain_class_refuses_a_part_of_the_checkpoint(tmp_path: Path) -> None:
    acmoe.attach(build("qwen3_vl_moe.whole")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"an adaptive model: `import acmoe\.hf`"):
        transformers.Qwen3VLMoeTextModel.from_pretrained(tmp_path, experts_implementation="eager")
