"""An attached model can be pickled: `torch.save(model)`, and arguments of spawned processes."""

import io
import pickle

import pytest
import torch
from attached import ids, logits, measured
from small_models import build, is_known
from torch import nn
from transformers import MixtralForCausalLM

import acmoe


class OwnMixtral(MixtralForCausalLM):
    """A model class of a user, which transformers does not have."""


def own() -> nn.Module:
    torch.manual_seed(0)
    model = acmoe.attach(OwnMixtral(build("mixtral").config), acmoe.AdaptiveConfig(momentum=0.5))
    return acmoe.calibrate(model, [ids(4, 24)]).eval()


# MistralLarge4's text model has a config of another class than its own class names.
@pytest.mark.parametrize("name", ["mixtral", "own", "mistral_large4"])
def test_a_pickled_model_is_the_same(name: str) -> None:
    if name != "own" and not is_known(name):
        pytest.skip(f"this version of transformers has no {name}")
    model = own() if name == "own" else measured(name)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is type(model) and type(loaded.config) is type(model.config)
    assert loaded.config.to_dict() == model.config.to_dict()
    assert torch.equal(logits(loaded, input_ids=ids()), logits(model, input_ids=ids()))


def test_torch_saves_a_whole_model_of_an_own_class() -> None:
    model, file = own(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(logits(loaded, input_ids=ids()), logits(model, input_ids=ids()))
