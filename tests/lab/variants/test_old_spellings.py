"""Variants as version 0.1 spelled them: in Python, in config.json and on the command line."""

import json
from typing import Any

import pytest
from started import fork_server

from acmoe import AdaptiveConfig, UserError, create_model
from acmoe.config.moved import VARIANT_FIELDS
from acmoe.config.routing import ROUTERS, router_config
from acmoe.config.serialize import decode, encode, from_document, to_document
from acmoe.config.text.language import LANGUAGE_MODELS
from acmoe.config.text.train import RunConfig, override_run
from acmoe.lab.variants import VariantConfig, VariantRouter
from acmoe.lab.variants.config import as_in_0_1
from without_variants import answer

RUN = RunConfig(model=LANGUAGE_MODELS["switch-nano"].config, steps=10, batch=4, lr=1e-3)
ADAPTIVE = ("model.router=adaptive", "model.router.statistics=batch")
VARIANT = ("model.router=adaptive-variant", "model.router.statistics=batch")


def document_of_0_1(run: RunConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(as_in_0_1(to_document(run))))
    return found


def test_the_fields_that_moved_are_those_of_the_variant_with_the_same_defaults() -> None:
    added = VariantConfig.__dataclass_fields__.keys() - AdaptiveConfig.__dataclass_fields__.keys()
    assert added == VARIANT_FIELDS.keys() | {"distance", "fade_steps"}  # both later than 0.1
    assert {name: getattr(VariantConfig(), name) for name in VARIANT_FIELDS} == VARIANT_FIELDS


def test_the_variant_is_a_router_by_name() -> None:
    assert ROUTERS["adaptive-variant"] is VariantConfig
    assert router_config("adaptive-variant") == VariantConfig()
    model = create_model("switch-nano", router="adaptive-variant")
    assert sum(isinstance(module, VariantRouter) for module in model.modules()) == 3


def test_the_command_line_takes_the_variants_settings() -> None:
    run = override_run(RUN, (*VARIANT, "model.router.power=0.5", "model.router.strength_end=none"))
    router = run.model.router
    assert isinstance(router, VariantConfig)
    assert (router.power, router.statistics, router.base.bias) == (0.5, "batch", True)
    assert from_document(json.loads(json.dumps(to_document(run))), RunConfig, "a test") == run
    with pytest.raises(UserError, match=r"model.router.powr is unknown; did you mean .*power"):
        override_run(RUN, (*VARIANT, "model.router.powr=0.5"))


@pytest.mark.parametrize("first", [ADAPTIVE, ()], ids=["named", "held"])
def test_a_moved_setting_of_an_adaptive_router_still_works_with_a_warning(
    first: tuple[str, ...],
) -> None:
    held = RUN if first else override_run(RUN, ADAPTIVE)
    with pytest.warns(FutureWarning, match=r"model.router=adaptive-variant model.router.power="):
        found = override_run(held, (*first, "model.router.power=0.5"))
    assert found == override_run(RUN, (*VARIANT, "model.router.power=0.5"))


def test_a_setting_that_never_was_is_still_unknown() -> None:
    with pytest.raises(UserError, match=r"setting model.router.moment is unknown"):
        override_run(RUN, (*ADAPTIVE, "model.router.moment=1"))
    with pytest.raises(UserError, match=r"setting model.router.power is unknown"):
        override_run(RUN, ("model.router=smoe", "model.router.power=0.5"))


def test_an_adaptive_config_with_a_moved_field_is_a_variant_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=r"AdaptiveConfig\(power=...\) is now .*VariantConfig"):
        found = AdaptiveConfig(power=0.5, mix=2)
    assert found == VariantConfig(power=0.5, mix=2)
    with pytest.raises(TypeError, match="moment"):
        AdaptiveConfig(moment=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="strenght"):
        VariantConfig(strenght=0.5)  # type: ignore[call-arg]


def test_a_stored_config_at_the_defaults_is_the_plain_one() -> None:
    run = override_run(RUN, ADAPTIVE)
    document = document_of_0_1(run)
    assert document["config"]["model"]["router"]["gain"] is True
    assert from_document(document, RunConfig, "config.json") == run


def test_a_stored_config_with_other_values_is_a_variant() -> None:
    run = override_run(RUN, (*VARIANT, "model.router.part=own", "model.router.read=residual"))
    document = document_of_0_1(run)
    assert document["config"]["model"]["router"]["name"] == "adaptive"
    assert from_document(document, RunConfig, "config.json") == run


def test_a_stored_variant_is_checked_like_any_other() -> None:
    stored = encode(VariantConfig()) | {"name": "adaptive", "power": "half"}
    with pytest.raises(UserError, match=r"a file: power='half'; expected a number"):
        decode(stored, AdaptiveConfig, "a file")
    with pytest.raises(UserError, match=r"a file has an unknown setting moment"):
        decode(encode(AdaptiveConfig()) | {"moment": 1}, AdaptiveConfig, "a file")


def test_without_the_import_a_variant_says_what_to_import_and_the_command_line_knows_it() -> None:
    variant = override_run(RUN, (*VARIANT, "model.router.power=0.5"))
    documents = [
        document_of_0_1(override_run(RUN, ADAPTIVE)),
        document_of_0_1(variant),
        to_document(variant),
    ]
    forks = fork_server()
    receiver, sender = forks.Pipe(duplex=False)
    process = forks.Process(target=answer, args=(sender, *documents))
    process.start()
    sender.close()
    found = receiver.recv()
    process.join()
    assert found.pop("lab") == []
    assert found.pop("command")
    assert found.pop("plain") == "AdaptiveConfig"
    assert found["variant"].startswith("config.json: power")
    for message in found.values():
        assert "`import acmoe.lab.variants`" in message
        assert "\n" not in message
