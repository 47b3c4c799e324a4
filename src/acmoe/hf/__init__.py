"""HuggingFace transformers models: find their MoE routers and make them adaptive.

Importing this package imports transformers; `import acmoe` does not. It also lets AutoConfig and
AutoModel... load attached models that were saved (`acmoe.hf.auto`).
"""

from typing import TYPE_CHECKING, Any

from acmoe.hf.attach import attach, detach
from acmoe.hf.auto import NAME as _NAME
from acmoe.hf.auto import know_all_types as _know_all_types
from acmoe.hf.blend import set_blend
from acmoe.hf.calibrate import calibrate
from acmoe.hf.classes import adaptive_class
from acmoe.hf.families import register_family
from acmoe.hf.statistics import load_statistics, save_statistics

if TYPE_CHECKING:  # at run time by __getattr__
    from acmoe.hf.trainer import StatisticsCallback as StatisticsCallback

__all__ = [
    "StatisticsCallback",
    "adaptive_class",
    "attach",
    "calibrate",
    "detach",
    "load_statistics",
    "register_family",
    "save_statistics",
    "set_blend",
]

_know_all_types()


def __getattr__(name: str) -> Any:
    """Import the callback, and make classes such as `AdaptiveMixtralForCausalLM`, when asked."""
    if name == "StatisticsCallback":
        from acmoe.hf.trainer import StatisticsCallback

        return StatisticsCallback
    if name.startswith(_NAME):
        import transformers

        from acmoe.hf.classes import adaptive_config_class

        plain = getattr(transformers, name.removeprefix(_NAME), None)
        if isinstance(plain, type) and issubclass(plain, transformers.PreTrainedModel):
            return adaptive_class(plain)
        if isinstance(plain, type) and issubclass(plain, transformers.PreTrainedConfig):
            return adaptive_config_class(plain)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
