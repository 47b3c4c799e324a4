"""Register the classes of attached models with transformers: Auto classes and key conversions.

`import acmoe.hf` lets AutoConfig know all model types "acmoe_...", of any family. The classes of a
family are made when one of its checkpoints is loaded, or when one of its models is attached, so
that no modeling file is imported before.
"""

import sys
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers.models.auto import (
    configuration_auto,
    feature_extraction_auto,
    image_processing_auto,
    modeling_auto,
    processing_auto,
    tokenization_auto,
    video_processing_auto,
)

PREFIX = "acmoe_"  # prefix of model types
NAME = "Adaptive"  # beginning of class names

CONFIGS = configuration_auto.CONFIG_MAPPING
AdaptiveClass = Callable[[type[PreTrainedModel]], type[PreTrainedModel]]
AdaptiveConfigClass = Callable[[type[PreTrainedConfig]], type[PreTrainedConfig]]


class AdaptiveTypes(dict[str, type[PreTrainedConfig]]):
    """Registered configs by model type. Those of attached models are made when looked up."""

    def __init__(
        self,
        registered: dict[str, type[PreTrainedConfig]],
        adaptive_config_class: AdaptiveConfigClass,
    ) -> None:
        super().__init__(registered)
        self.adaptive_config_class = adaptive_config_class

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or plain_type(key) is not None

    def __missing__(self, key: str) -> type[PreTrainedConfig]:
        plain = plain_type(key)
        if plain is None:
            raise KeyError(key)
        return self.adaptive_config_class(CONFIGS[plain])


def plain_type(key: object) -> str | None:
    """Return "mixtral" for "acmoe_mixtral"; None for what is no type of an attached model."""
    plain = key.removeprefix(PREFIX) if isinstance(key, str) else ""
    return plain if plain != key and plain in CONFIGS else None


def know_all_types(adaptive_config_class: AdaptiveConfigClass) -> None:
    """Let AutoConfig know the model types of attached models, without making their classes.

    adaptive_config_class: makes the config class of attached models from the plain one.
    """
    known = CONFIGS._extra_content
    if not isinstance(known, AdaptiveTypes):
        CONFIGS._extra_content = AdaptiveTypes(known, adaptive_config_class)


def register_config(
    config: type[PreTrainedConfig], plain: type[PreTrainedConfig], adaptive_class: AdaptiveClass
) -> None:
    """Register a config class with AutoConfig, and its models with the AutoModel classes."""
    CONFIGS.register(config.model_type, config, exist_ok=True)
    _register_conversion(config.model_type, plain.model_type)
    _register_processors(config, plain)
    for auto in _auto_models():
        found = auto._model_mapping.get(plain, None)
        for model in found if isinstance(found, list | tuple) else (found,):
            # The model of a part, such as the text model of a larger config, has its own config.
            if model is not None and model.config_class is plain:
                adaptive_class(model)


def register_model(model: type[PreTrainedModel], plain: type[PreTrainedModel]) -> None:
    """Register a class with those Auto classes that have its plain class."""
    _register_conversion(model.__name__, plain.__name__)
    config = model.config_class
    for auto in _auto_models():
        found = auto._model_mapping.get(config.plain_class, None)
        if plain in (found if isinstance(found, list | tuple) else (found,)):
            auto.register(config, model, exist_ok=True)
            # Trainer and pipelines look up the name of the class to know what the model does.
            auto._model_mapping._model_mapping[config.model_type] = model.__name__


def _auto_models() -> list[Any]:
    found = (one for one in vars(modeling_auto).values() if isinstance(one, type))
    return [one for one in found if getattr(one, "_model_mapping", None) is not None]


def _register_conversion(name: str, plain: str) -> None:
    """Convert keys of checkpoints as for the plain model: some hold one tensor per expert."""
    conversions = conversion_mapping.get_checkpoint_conversion_mapping(plain)
    if conversions is None:
        return
    conversion_mapping.register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    # PEFT translates old names of experts, such as w1, by a copy of this table.
    peft = sys.modules.get("peft.utils.transformers_weight_conversion")
    for module in (conversion_mapping, peft):
        table = getattr(module, "_MODEL_TO_CONVERSION_PATTERN", {})
        table[name] = table.get(plain, plain)


def _register_processors(config: type[PreTrainedConfig], plain: type[PreTrainedConfig]) -> None:
    """Let AutoTokenizer, AutoProcessor and their like treat the config as the plain one."""
    for mapping in (
        tokenization_auto.TOKENIZER_MAPPING,
        processing_auto.PROCESSOR_MAPPING,
        image_processing_auto.IMAGE_PROCESSOR_MAPPING,
        feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING,
        video_processing_auto.VIDEO_PROCESSOR_MAPPING,
    ):
        names = mapping._reverse_config_mapping
        if plain.__name__ in names:
            names[config.__name__] = names[plain.__name__]
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    if plain.model_type in names:
        names[config.model_type] = names[plain.model_type]
        modules = configuration_auto.SPECIAL_MODEL_TYPE_TO_MODULE_NAME
        modules[config.model_type] = configuration_auto.model_type_to_module_name(plain.model_type)
    corrected: set[str] = getattr(
        tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set()
    )
    if plain.model_type in corrected:
        corrected.add(config.model_type)
