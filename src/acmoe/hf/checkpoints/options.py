"""The options of `attach` as they stand in the config of an attached model, the field `acmoe`."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import UserError, check

FORMAT = 1  # raised when an older acmoe would misread the options


def options_of(
    config: AdaptiveConfig, *, skip: int, layers: Sequence[int] | None, blend_steps: int
) -> dict[str, Any]:
    """Return what a config stores: all options, also those with default values."""
    return {
        "format": FORMAT,
        "skip": skip,
        "layers": None if layers is None else [*layers],
        "blend_steps": blend_steps,
        "router": as_dict(config),
    }


def as_dict(config: AdaptiveConfig) -> dict[str, Any]:
    """Return all fields but `base`, also those with default values: a default may change."""
    return {one.name: getattr(config, one.name) for one in fields(config) if one.name != "base"}


def attach_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments of `attach` that a config of transformers stores."""
    stored = getattr(config, "acmoe", None)
    if not isinstance(stored, Mapping):
        raise UserError(
            f"{type(config).__name__} has no field 'acmoe'; build or load the plain model, and "
            "call acmoe.attach(model)"
        )
    check(
        stored.get("format") in range(1, FORMAT + 1),
        f"acmoe.format is {stored.get('format')!r} in this config, and this version of acmoe reads "
        f"up to {FORMAT}; upgrade acmoe",
    )
    arguments = {name: value for name, value in stored.items() if name not in ("format", "router")}
    router = stored.get("router")
    if not isinstance(router, Mapping):
        raise UserError(
            f"acmoe.router is {router!r} in this config, which is damaged; restore config.json "
            "from a copy, or attach the plain model again"
        )
    known = {"skip", "layers", "blend_steps"}
    unknown = sorted({*arguments} - known) + sorted({*router} - {*as_dict(AdaptiveConfig())})
    check(not unknown, f"acmoe.{unknown and unknown[0]} in this config is unknown; upgrade acmoe")
    return {**arguments, "config": AdaptiveConfig(**router)}
