"""Create models by name or by config."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from torch import nn

from acmoe.config.images.presets import (
    SOFT_VIT_MODELS,
    SWIN_MODELS,
    VisionModelCard,
    vision_router,
)
from acmoe.config.images.vision import SoftViTConfig, SwinConfig
from acmoe.config.routing import RouterConfig
from acmoe.config.text.language import (
    LANGUAGE_MODELS,
    LanguageConfig,
    LanguageModelCard,
    language_router,
)
from acmoe.errors import UserError, check, suggest
from acmoe.models.images.swin import SwinModel
from acmoe.models.images.vit import SoftViT
from acmoe.models.text.decoder import LanguageModel

ModelCard = LanguageModelCard | VisionModelCard


class Family(NamedTuple):
    """Models that share a config class and a backbone."""

    config: type[Any]
    cards: Mapping[str, ModelCard]
    build: Callable[[Any], nn.Module]
    router: Callable[
        [str | RouterConfig, Any], RouterConfig
    ]  # router config by name, with the family's defaults


# Functions that are called with every model that a family has built; other packages may add some.
AFTER_BUILD: list[Callable[[nn.Module], object]] = []


def _builder(model_class: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    """Return a function that builds a model and then calls the functions of AFTER_BUILD."""

    def build(config: Any) -> nn.Module:
        model = model_class(config)
        for prepare in AFTER_BUILD:
            prepare(model)
        return model

    return build


FAMILIES: dict[str, Family] = {
    "language": Family(LanguageConfig, LANGUAGE_MODELS, _builder(LanguageModel), language_router),
    "swin": Family(SwinConfig, SWIN_MODELS, _builder(SwinModel), vision_router),
    "softmoe": Family(SoftViTConfig, SOFT_VIT_MODELS, _builder(SoftViT), vision_router),
}


def list_models() -> list[str]:
    """Return the names that `create_model` accepts."""
    return [name for family in FAMILIES.values() for name in family.cards]


def model_card(name: str) -> ModelCard:
    """Return config, description and the paper's figures of a named model."""
    return _family(name).cards[name]


def create_model(
    name: str, *, router: str | RouterConfig | None = None, **overrides: Any
) -> nn.Module:
    """Return a freshly initialised model; `overrides` change fields of its config.

    router: None stands for the router of the model's card: the plain one ("smoe"; in SoftMoE
    "soft"), except in the models named after the published code.

    >>> model = create_model("switch-nano", router="adaptive", dropout=0.1)

    A rescaling router with the default base wraps the model's own gate, so that models of one name
    differ only in the router's scale.
    """
    family = _family(name)
    known = [field.name for field in fields(family.config)]
    for option in overrides:
        check(option in known, f"{name} has no option {option!r}; {suggest(option, known)}")
    config = replace(family.cards[name].config, **overrides)
    if router is not None:
        config = replace(config, router=family.router(router, config))
    return family.build(config)


def build_model(config: object) -> nn.Module:
    """Return a model from any family's config."""
    for family in FAMILIES.values():
        if isinstance(config, family.config):
            return family.build(config)
    raise UserError(f"{type(config).__name__} is no model config; see acmoe.list_models()")


def _family(name: str) -> Family:
    """Return the family that has a model of this name."""
    check(
        isinstance(name, str),
        f"name={name!r} is no name of a model; choose one of {', '.join(list_models())}",
    )
    for family in FAMILIES.values():
        if name in family.cards:
            return family
    raise UserError(f"model {name!r} is unknown; {suggest(name, list_models())}")
