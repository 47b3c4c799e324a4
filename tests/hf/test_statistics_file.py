"""Statistics are saved apart from the weights, and refused by a model that they do not fit."""

from pathlib import Path

import pytest
import torch
from attached import logits, measured
from small_models import build, inputs
from torch import nn

import acmoe
import acmoe.hf
from acmoe import AdaptiveConfig, UserError


def attached(**fields: str) -> nn.Module:
    return acmoe.attach(build("mixtral"), AdaptiveConfig(momentum=0.5, **fields), skip=0)


def test_the_same_model_with_the_file_is_bitwise_the_saved_one(tmp_path: Path) -> None:
    model, other = measured(), attached()
    file = acmoe.hf.save_statistics(model, tmp_path / "new")
    assert [*(tmp_path / "new").iterdir()] == [file]
    acmoe.hf.load_statistics(other, tmp_path / "new")
    assert torch.equal(logits(other, **inputs("mixtral")), logits(model, **inputs("mixtral")))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no acmoe_statistics\.safetensors; write it by"):
        acmoe.hf.load_statistics(attached(), tmp_path)
    with pytest.raises(UserError, match="MixtralForCausalLM has no attached router"):
        acmoe.hf.save_statistics(build("mixtral"), tmp_path)
    acmoe.hf.save_statistics(attached(), tmp_path)
    with pytest.raises(UserError, match=r"differs from the model at model\.layers\.0.*\"skip\": 0"):
        acmoe.hf.load_statistics(acmoe.attach(build("mixtral"), skip=2), tmp_path)
    with pytest.raises(UserError, match="measure='mad', and the model has measure"):
        acmoe.hf.load_statistics(attached(measure="std"), tmp_path)
    file = acmoe.hf.save_statistics(attached(), tmp_path)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(
        UserError, match=r"statistics\.safetensors cannot be read: .*; write it anew"
    ):
        acmoe.hf.load_statistics(attached(), tmp_path)
