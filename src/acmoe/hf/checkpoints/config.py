"""The configs of attached models, and how they make plain classes refuse a checkpoint."""

import json
import os
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig

from acmoe.hf.checkpoints.auto import NAME, PREFIX

# Fields of configs that plain classes read and check. A user may pass another value for the second.
REFUSED = ("transformers_weights", "experts_implementation")
REFUSAL = "an adaptive model: `import acmoe.hf` and load it by AutoModelForCausalLM or its like"


class AdaptiveModelConfig:
    """Base class for the configs of attached models; their field `acmoe` has `attach`'s options."""

    plain_class: type[PreTrainedConfig]
    _auto_class = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, without the `auto_map` of remote code: it names the plain classes."""
        fields: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        fields.pop("auto_map", None)
        return fields

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write the fields, and two by which every plain class refuses the checkpoint.

        `MixtralForCausalLM.from_pretrained` only warns of another model type. But it raises for a
        weights file that is no safetensors file, and for an experts implementation that it does not
        know, and prints their names.
        """
        fields = json.loads(self.to_json_string(use_diff))  # type: ignore[attr-defined]
        name = (getattr(self, "architectures", None) or [""])[0]
        _refuse(fields, f"{REFUSAL}, or {_by_class(name)}")
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        Path(json_file_path).write_text(text, encoding="utf-8")

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """Read a config, also that of a plain checkpoint: PEFT looks up the vocabulary of the base
        model so, and transformers would warn of the other model type."""
        fields, rest = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        if fields.get("model_type") == cls.plain_class.model_type:
            fields = {**fields, "model_type": PREFIX + cls.plain_class.model_type}
        return fields, rest

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config without the fields by which plain classes refuse it."""
        return super().from_dict(_without_refusal(config_dict), **kwargs)  # type: ignore[misc]


def _by_class(name: str) -> str:
    """Say how to load a model by its adaptive class; acmoe.hf has those of transformers' models."""
    plain = name.removeprefix(NAME)
    known = hasattr(transformers, plain)
    return f"as acmoe.hf.{name}" if known else f"by acmoe.hf.adaptive_class({plain or 'ItsClass'})"


def _refuse(fields: dict[str, Any], text: str) -> None:
    """Write the text into a config, and into each sub-config with experts: the plain class of a
    submodel reads its sub-config alone."""
    fields.update(dict.fromkeys(REFUSED, text))
    for part in fields.values():
        if isinstance(part, dict) and "model_type" in part and any("expert" in key for key in part):
            _refuse(part, text)


def _without_refusal(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_refusal(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if not (key in REFUSED and str(value).startswith(REFUSAL))
    }
