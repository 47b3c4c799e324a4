"""`save` warns of attributes that were set by hand: a loaded model has those of its config."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from saved_models import TOKENS, small

import acmoe
from acmoe.models.checkpoint import load, save
from acmoe.models.text.decoder import LanguageModel


def set_capacity(model: LanguageModel) -> None:
    model.moe_layers()[0].capacity_factor = 1.25


def set_tensor(model: LanguageModel) -> None:
    model.moe_layers()[0].capacity_factor = torch.tensor(1.25)


def set_numpy(model: LanguageModel) -> None:
    model.moe_layers()[0].capacity_factor = np.float32(1.25)


def set_tensors(model: LanguageModel) -> None:
    model.blocks[0].attention.dropout = torch.zeros(2, 3)


def set_dropout(model: LanguageModel) -> None:
    model.blocks[0].dropout.p = 0.5


def set_module(model: LanguageModel) -> None:
    model.blocks[0].dropout = torch.nn.Identity()


def set_strength(model: LanguageModel) -> None:
    router = model.moe_layers()[1].router
    router.config = replace(router.config, strength=0.5)


def set_losses(model: LanguageModel) -> None:
    model.moe_layers()[0].router.losses = acmoe.LossConfig(z=0.1)


def set_config(model: LanguageModel) -> None:
    model.config = replace(model.config, dropout=0.3)


CHANGES: dict[Callable[[LanguageModel], None], str] = {
    set_capacity: r"layer\.capacity_factor=1\.25, not None \(1 in all\)",
    set_tensor: r"layer\.capacity_factor=1\.25, not None \(1 in all\)",
    set_numpy: r"layer\.capacity_factor=1\.25, not None \(1 in all\)",
    set_tensors: r"attention\.dropout=a tensor of shape \(2, 3\), not 0\.0 \(1 in all\)",
    set_dropout: r"blocks\.0\.dropout\.p=0\.5, not 0\.0 \(1 in all\)",
    set_module: r"blocks\.0\.dropout=Identity, not Dropout \(1 in all\)",
    set_strength: r"router\.config\.strength=0\.5, not None \(1 in all\)",
    set_losses: r"router\.losses\.z=0\.1, not 0\.0 \(1 in all\)",
    set_config: r"blocks\.0\.attention\.dropout=0\.0, not 0\.3; .* in all",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_attribute_that_is_not_in_the_config_is_named_and_the_weights_are_saved(
    tmp_path: Path, change: Callable[[LanguageModel], None]
) -> None:
    model = small("adaptive")
    change(model)
    with pytest.warns(UserWarning, match=f"{CHANGES[change]}.*; set them again after loading"):
        save(model, tmp_path)
    assert torch.equal(load(tmp_path).embed.weight, model.embed.weight)


@pytest.mark.parametrize("router", ["smoe", "adaptive", "stable", "metric"])
def test_a_model_that_was_trained_and_evaluated_saves_without_a_warning(
    tmp_path: Path, router: str
) -> None:
    model = acmoe.fast.accelerate(small(router).train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(TOKENS, TOKENS)
    (out.loss + out.aux_loss).backward()
    optimizer.step()
    model.eval()(TOKENS)
    model.checkpoint_blocks = True
    if router == "stable":
        for layer in model.moe_layers():
            layer.router.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (model, copy.deepcopy(model), model.train()):
            save(one, tmp_path)
