"""Configs survive JSON exactly; whatever does not fit is refused by name."""

import json
import pickle
from typing import Any

import pytest

from acmoe.config.routing import AdaptiveConfig
from acmoe.config.serialize import differences, from_document, to_document
from acmoe.config.text.finetune import finetune_config
from acmoe.config.text.language import LANGUAGE_MODELS
from acmoe.config.text.train import RunConfig, override_run
from acmoe.errors import UserError
from acmoe.recipes import recipe, recipes

RUN = RunConfig(model=LANGUAGE_MODELS["switch-nano"].config, steps=10, batch=4, lr=1e-3)


def through_json(config: Any) -> Any:
    return from_document(json.loads(json.dumps(to_document(config))), type(config), "config.json")


def test_a_pickle_of_a_version_with_other_computed_values_is_read() -> None:
    config = AdaptiveConfig(statistics="batch", eval_statistics="running")
    vars(config)["modes"] = ("batch", "running")  # as versions before `Modes` kept them
    found = pickle.loads(pickle.dumps(config))
    assert found == config
    assert found.modes.when(training=True) == "batch"
    assert found.modes.when(training=False) == "running"


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_comes_back_equal(name: str) -> None:
    assert through_json(recipe(name)) == recipe(name)


def test_lists_of_depths_and_finetuning_come_back_equal() -> None:
    run = override_run(RUN, ("model.placement=1,3", "model.router=adaptive", "clip=2"))
    assert through_json(run) == run
    assert through_json(finetune_config("sst2", "paper")) == finetune_config("sst2", "paper")


def document(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(to_document(RUN)))
    for key, value in changes.items():
        node = found["config"]
        *path, last = key.split("__")
        for part in path:
            node = node[part]
        if value is None:
            del node[last]
        else:
            node[last] = value
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"momentum": 1}, "config.json has an unknown setting momentum"),
        ({"model__router__colour": 1}, "config.json has an unknown setting model.router.colour"),
        ({"lr": None}, "config.json lacks the setting lr"),
        ({"model__dim": None}, "config.json lacks the setting model.dim"),
        ({"steps": "10"}, "config.json: steps='10'; expected a whole number"),
        ({"steps": True}, "config.json: steps=True; expected a whole number"),
        ({"compile": 1}, "config.json: compile=1; expected true or false"),
        ({"betas": [0.9]}, "config.json: betas=[0.9]; expected 2 values"),
        ({"schedule": "step"}, "config.json: schedule='step'; expected one of constant, cosine"),
        ({"model": 3}, "config.json: model=3; expected a LanguageConfig"),
        ({"model__router": "smoe"}, "config.json: model.router='smoe'; expected"),
        ({"model__router__name": "new"}, "config.json: model.router is 'new'; this acmoe knows"),
        ({"steps": -1}, "steps=-1; it must be a whole number"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as mistake:
        from_document(document(**changes), RunConfig, "config.json")
    assert message in str(mistake.value)


@pytest.mark.parametrize("broken", [[], {"format": 2, "config": {}}, {"format": 1}])
def test_another_format_is_refused(broken: Any) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        from_document(broken, RunConfig, "config.json")


def test_a_missing_optional_setting_takes_its_default() -> None:
    assert from_document(document(keep=None), RunConfig, "config.json") == RUN


def test_differences_name_each_setting_with_both_values() -> None:
    other = override_run(RUN, ("lr=0.5", "model.router=cosine", "data.limit=100"))
    assert differences(RUN, other) == [
        "model.router.name=smoe, not cosine",
        "data.limit=None, not 100",
        "lr=0.001, not 0.5",
    ]
    assert differences(RUN, RUN) == []
