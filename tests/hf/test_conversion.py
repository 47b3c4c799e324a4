"""An attached model loads the tensors of its file by `load_state_dict`, as the Trainer does."""

from pathlib import Path

import pytest
import torch
import transformers
from attached import measured
from safetensors.torch import load_file
from small_models import FAMILIES, build, is_known
from test_discovery import LOGITS_SINCE_5_22, VERSION
from test_save import REFUSED

import acmoe
from acmoe import AdaptiveConfig, UserError


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - REFUSED))
def test_load_state_dict_takes_the_names_of_a_file_of_every_family(
    name: str, tmp_path: Path
) -> None:
    if not is_known(name) or (name in LOGITS_SINCE_5_22 and VERSION < (5, 22)):
        pytest.skip(f"transformers {transformers.__version__} has no router of {name}")
    model, other = acmoe.attach(build(name)), acmoe.attach(build(name, seed=1))
    model.save_pretrained(tmp_path)
    report = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not report.unexpected_keys
    after = other.state_dict()
    assert all(torch.equal(after[key], value) for key, value in model.state_dict().items())


def test_load_state_dict_takes_the_names_of_a_file(tmp_path: Path) -> None:
    """The Trainer resumes so; a file of Mixtral has one tensor per expert, its modules do not."""
    model, other = measured(), acmoe.attach(build("mixtral", seed=1), AdaptiveConfig(momentum=0.5))
    model.save_pretrained(tmp_path)
    weights = {key: id(value) for key, value in other.named_parameters()}
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".experts.0." in key for key in stored)
    other.load_state_dict(stored)
    assert {key: id(value) for key, value in other.named_parameters()} == weights
    before, after = model.state_dict(), other.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    stored["unheard.of"] = torch.zeros(1)
    del stored["lm_head.weight"]
    report = other.load_state_dict(stored, strict=False)
    assert report == (["lm_head.weight"], ["unheard.of"])
    part = {key: value for key, value in stored.items() if ".experts.3." not in key}
    with pytest.raises(UserError, match=r"only some of the experts of model\.layers\.0\.mlp\.exp"):
        other.load_state_dict(part, strict=False)
