"""The options of `attach` as they stand in the config of an attached model, the field `acmoe`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from acmoe.config.routing import AdaptiveConfig, SMoEConfig
from acmoe.errors import UserError, check

FORMAT = 1  # raised when an older acmoe would misread the options


@dataclass(frozen=True)
class AttachOptions:
    """The options of `attach`, which explains them."""

    config: AdaptiveConfig
    skip: int = 1
    layers: Sequence[int] | None = None
    blend_steps: int = 0

    def __post_init__(self) -> None:
        check(
            isinstance(self.blend_steps, int) and self.blend_steps >= 0,
            f"blend_steps={self.blend_steps!r}; it must be a whole number, 0 or more",
        )

    def stored(self) -> dict[str, Any]:
        """Return what a config stores: all options, also those with default values."""
        return {
            "format": FORMAT,
            "skip": self.skip,
            "layers": None if self.layers is None else [*self.layers],
            "blend_steps": self.blend_steps,
            "router": as_dict(self.config),
        }


def check_config(config: object) -> AdaptiveConfig:
    """Return the config; raise a UserError for what only acmoe's own layers can do."""
    if config == AdaptiveConfig.name:
        return AdaptiveConfig()
    if type(config) is not AdaptiveConfig:
        shown = repr(config) if isinstance(config, str) else type(config).__name__
        raise UserError(
            f"config={shown} cannot be attached to a transformers model; pass 'adaptive' or an "
            "acmoe.AdaptiveConfig"
        )
    check(
        config.base == SMoEConfig(),
        f"base={type(config.base).__name__}(...) is not the default, and attach keeps the model's "
        "own router; leave base out",
    )
    check(
        not config.scale_experts,
        "scale_experts=True needs acmoe's own layers: attach rescales the router's input alone; "
        "use scale_experts=False",
    )
    return config


def as_dict(config: AdaptiveConfig) -> dict[str, Any]:
    """Return all fields but `base`, also those with default values: a default may change."""
    return {one.name: getattr(config, one.name) for one in fields(config) if one.name != "base"}


def read_options(config: Any) -> AttachOptions:
    """Return the options of `attach` that a config of transformers stores."""
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
    options = {name: value for name, value in stored.items() if name not in ("format", "router")}
    router = stored.get("router")
    if not isinstance(router, Mapping):
        raise UserError(
            f"acmoe.router is {router!r} in this config, which is damaged; restore config.json "
            "from a copy, or attach the plain model again"
        )
    known = {"skip", "layers", "blend_steps"}
    unknown = sorted({*options} - known) + sorted({*router} - {*as_dict(AdaptiveConfig())})
    check(not unknown, f"acmoe.{unknown and unknown[0]} in this config is unknown; upgrade acmoe")
    return AttachOptions(check_config(AdaptiveConfig(**router)), **options)
