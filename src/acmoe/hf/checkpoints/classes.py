"""Classes of attached models, so that `save_pretrained` and `from_pretrained` keep them adaptive.

`attach` turns a `MixtralForCausalLM` into an `AdaptiveMixtralForCausalLM`, a subclass, and its
`MixtralConfig` into an `AdaptiveMixtralConfig`, whose model type is "acmoe_mixtral". Loading builds
the subclass, which attaches itself as its config says, and so finds a place for the statistics.
Without acmoe the model type is unknown, and transformers refuses the checkpoint: it would otherwise
run the plain model. `acmoe.hf.checkpoints.auto` registers the classes.
"""

import copy
from contextvars import ContextVar
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from acmoe.errors import check
from acmoe.hf.adaptive import AdaptivePart
from acmoe.hf.checkpoints.adapters import StatisticsBeside, follow_peft
from acmoe.hf.checkpoints.auto import NAME, PREFIX, register_config, register_model
from acmoe.hf.checkpoints.config import AdaptiveModelConfig
from acmoe.hf.checkpoints.conversion import by_module_names
from acmoe.hf.checkpoints.options import AttachOptions, read_options
from acmoe.hf.checkpoints.wrappers import outermost_models
from acmoe.hf.hooks import PLACE
from acmoe.hf.parts import add_parts
from acmoe.routing.statistics.step import StepStatistics

_CONFIGS: dict[type[PreTrainedConfig], type[PreTrainedConfig]] = {}  # plain class -> adaptive
_MODELS: dict[tuple[type[PreTrainedModel], type[PreTrainedConfig]], type[PreTrainedModel]] = {}

INITIALIZED = "_is_hf_initialized"  # attribute by which transformers marks what has its value
# True while an attached model is built: some build their body by AutoModel.from_config(config).
_NESTED: ContextVar[bool] = ContextVar("nested", default=False)


class AdaptiveModel(StatisticsBeside):
    """Base of the classes of attached models. It attaches a new model as its config says."""

    plain_class: type[PreTrainedModel]
    _auto_class = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        options = read_options(config)
        nested = _NESTED.get()
        token = _NESTED.set(True)
        try:
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        finally:
            _NESTED.reset(token)
        if not nested:
            _make_parts_plain(self)
            assert isinstance(self, nn.Module)
            add_parts(self, options)
            adopt(self, options)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return the answer of the plain class: transformers looks for experts in the source file
        of the class. Here it would find none, and run them in its slow loop, "eager"."""
        return bool(cls.plain_class._can_set_experts_implementation())

    def initialize_weights(self) -> None:
        """Initialise tensors that the checkpoint lacks and `from_pretrained` left undefined."""
        assert isinstance(self, nn.Module)
        found = (module for module in self.modules() if isinstance(module, StepStatistics))
        new = [one for one in found if not getattr(one, INITIALIZED, False)]
        super().initialize_weights()  # type: ignore[misc]
        for one in new:
            _reset_missing(one)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Make the part of `generate` that drafts tokens, as for the plain class: an assistant of
        Gemma 4 asks whether the name of the model's class begins with "Gemma4"."""
        kind = type(self)
        try:
            self.__class__ = self.plain_class
            return self._get_candidate_generator(*args, **kwargs)
        finally:
            self.__class__ = kind

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load tensors that are named as this model's modules, or as in a checkpoint file."""
        found = by_module_names(self, state_dict)
        return super().load_state_dict(found, strict, assign)  # type: ignore[misc]

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the names of tied tensors, and none of the statistics: the patterns by which
        DiffusionGemma ties the weights of its two stacks fit these as well."""
        tied = super().get_expanded_tied_weights_keys(all_submodels)  # type: ignore[misc]
        return {name: other for name, other in tied.items() if f".{PLACE}." not in name}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the plain classes: `acmoe.hf` has no name for the class of a user's model, nor
        for a model with a config of another class than its own names."""
        reduced = super().__reduce_ex__(protocol)
        kind: Any = type(self)
        if "plain_class" not in vars(kind):  # `fully_shard` has derived the class from an adaptive
            return reduced
        return _new_model, (kind.plain_class, kind.config_class.plain_class), *reduced[2:]


def _new_model(plain: type[PreTrainedModel], config: type[PreTrainedConfig]) -> Any:
    """Return an adaptive model without any attribute, for pickle."""
    kind: Any = adaptive_class(plain, config)
    return kind.__new__(kind)


def _new_config(plain: type[PreTrainedConfig]) -> Any:
    """Return an adaptive config without any field, for pickle."""
    kind: Any = adaptive_config_class(plain)
    return kind.__new__(kind)


def _reduce_config(self: Any, protocol: Any) -> Any:
    """Pickle a config by its plain class, as `AdaptiveModel` does."""
    reduced = super(AdaptiveModelConfig, self).__reduce_ex__(protocol)
    return _new_config, (self.plain_class,), *reduced[2:]


def _reset_missing(statistics: StepStatistics) -> None:
    """Empty the buffers that were not loaded."""
    loaded = {
        name: buffer.clone()
        for name, buffer in statistics._buffers.items()
        if buffer is not None and getattr(buffer, INITIALIZED, False)
    }
    statistics.reset_parameters()
    for name, value in loaded.items():
        getattr(statistics, name).copy_(value)


def adaptive_config_class(plain: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the config class of attached models, a subclass of `plain`, and register it."""
    if issubclass(plain, AdaptiveModelConfig):
        return plain
    if plain not in _CONFIGS:
        namespace = {
            "model_type": PREFIX + plain.model_type,
            "plain_class": plain,
            "__module__": "acmoe.hf",
            "__doc__": f"A {plain.__name__} of a model that acmoe.attach has made adaptive.",
            "__reduce_ex__": _reduce_config,
        }
        _CONFIGS[plain] = type(NAME + plain.__name__, (AdaptiveModelConfig, plain), namespace)
        register_config(_CONFIGS[plain], plain, adaptive_class)
    return _CONFIGS[plain]


def adaptive_class(
    plain: type[PreTrainedModel], config: type[PreTrainedConfig] | None = None
) -> type[PreTrainedModel]:
    """Return the class of attached models of the class `plain`, a subclass, and register it.

    config: The class of their plain configs; by default the one that `plain` names.

    >>> from transformers import MixtralForCausalLM
    >>> adaptive_class(MixtralForCausalLM).__name__
    'AdaptiveMixtralForCausalLM'
    """
    if issubclass(plain, AdaptiveModel):
        return plain
    config = adaptive_config_class(plain.config_class if config is None else config)
    if (plain, config) not in _MODELS:
        namespace = {
            "config_class": config,
            "plain_class": plain,
            # Statistics stay in float32 where from_pretrained gets another dtype.
            "_keep_in_fp32_modules_strict": {
                *(plain._keep_in_fp32_modules_strict or ()),
                "adaptive",
            },
            "__module__": "acmoe.hf",
            "__doc__": f"A {plain.__name__} that acmoe.attach has made adaptive.",
        }
        _MODELS[plain, config] = type(_name_of(plain), (AdaptiveModel, plain), namespace)
        register_model(_MODELS[plain, config], plain)
    return _MODELS[plain, config]


def _name_of(plain: type[PreTrainedModel]) -> str:
    """Return the name of the adaptive class. `fully_shard` puts a prefix before the name of a
    model's class, which transformers takes off where it saves the model."""
    sharded = "FSDP" if plain.__name__.startswith("FSDP") else ""
    return sharded + NAME + plain.__name__.removeprefix(sharded)


def adopt(model: nn.Module, options: AttachOptions) -> None:
    """Give the attached models in `model` their adaptive classes; write the options to configs."""
    follow_peft()
    for one in outermost_models(model):
        if not any(isinstance(module, AdaptivePart) for module in one.modules()):
            continue
        if not isinstance(one, AdaptiveModel):
            kind = adaptive_class(type(one), type(one.config))
            _own_config(model, one.config)
            _change_class(one, kind)
            one.config.__class__ = kind.config_class
            for module in one.modules():
                if isinstance(module, StepStatistics):
                    setattr(module, INITIALIZED, True)
        one.config.acmoe = options.stored()


def check_whole(model: nn.Module) -> None:
    """Raise a UserError for a part of an attached model, whose class and config are the whole's."""
    for one in outermost_models(model):
        modules = list(one.modules())
        attached = any(isinstance(module, AdaptivePart) for module in modules)
        check(
            not attached or any(isinstance(module, AdaptiveModel) for module in modules),
            f"{type(one).__name__} is a part of an attached model, which would keep its adaptive "
            "class and config; call acmoe.detach on the model that acmoe.attach got",
        )


def release(model: nn.Module) -> None:
    """Give back the plain classes."""
    for module in model.modules():
        if isinstance(module, AdaptiveModel):
            _change_class(module, _plain_kind(type(module)))
            config: Any = module.config
            config.__class__ = config.plain_class
            del config.acmoe


def _plain_kind(kind: Any) -> Any:
    """Return the plain class of an adaptive one, also where `fully_shard` has derived a class from
    the adaptive one: the result is then derived from the plain one."""
    if "plain_class" in vars(kind):
        return kind.plain_class
    if not issubclass(kind, AdaptiveModel):
        return kind
    bases = tuple(_plain_kind(base) for base in kind.__bases__)
    return type(kind.__name__.replace(NAME, "", 1), bases, dict(vars(kind)))


def _make_parts_plain(model: Any) -> None:
    """Give back the plain classes of the models inside of a model."""
    for module in model.modules():
        if module is not model and isinstance(module, AdaptiveModel):
            _change_class(module, module.plain_class)


def _change_class(model: Any, kind: type[PreTrainedModel]) -> None:
    # transformers looks up by the name of the class which outputs a model can record.
    _CAN_RECORD_REGISTRY[str(kind)] = _CAN_RECORD_REGISTRY.get(str(type(model)))
    model.__class__ = kind


def _own_config(model: nn.Module, config: PreTrainedConfig) -> None:
    """Replace a config by a copy in all modules: another model may have been built with it."""
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)
    for module in model.modules():
        own = module.__dict__.get("config")
        if isinstance(own, PreTrainedConfig) and id(own) in copies:
            module.config = copies[id(own)]
