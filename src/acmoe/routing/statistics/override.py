"""Change options of a model's adaptive routers for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import check


def adaptive_configs(model: nn.Module) -> list[tuple[nn.Module, str, AdaptiveConfig]]:
    """Return (module, attribute, config) of everything in the model that holds an AdaptiveConfig.

    The statistics, their router and the previous layer each hold it.
    """
    return [
        (module, name, config)
        for module in model.modules()
        for name in ("config", "next_router")
        if isinstance(config := getattr(module, name, None), AdaptiveConfig)
    ]


@contextlib.contextmanager
def override_statistics(model: nn.Module, **changes: Any) -> Iterator[None]:
    """Change fields of every adaptive config inside `with`, for an evaluation or an attack.

    >>> # with override_statistics(model, eval_statistics="running"): ...
    >>> # with override_statistics(model, detach=False): ...   # a white-box attack
    """
    found = adaptive_configs(model)
    check(
        bool(found),
        f"{', '.join(changes)} cannot be overridden: the model has no adaptive layer; leave "
        "override_statistics out",
    )
    kinds = {type(config) for *_, config in found}
    fixed = {name for kind in kinds for name in kind.built_with}
    for name in changes:
        check(
            name not in fixed and all(name in kind.__dataclass_fields__ for kind in kinds),
            f"{name}={changes[name]!r} cannot be overridden; {', '.join(sorted(fixed))} are fixed "
            "when a model is built, and any other name must be a field of AdaptiveConfig",
        )
    try:
        for module, name, config in found:
            setattr(module, name, _changed(config, changes, module.training))
        yield
    finally:
        for module, name, config in found:
            setattr(module, name, config)


def _changed(config: AdaptiveConfig, changes: dict[str, Any], training: bool) -> AdaptiveConfig:
    """Return the changed config; raise a UserError if a built model cannot follow the change."""
    changed = config.overridden(**changes)
    check(
        changed.reads == config.reads,
        f"{', '.join(f'{key}={value!r}' for key, value in changes.items())} would take "
        f"statistics of the {changed.reads} layer in a model built "
        f"for the {config.reads} one; build it with statistics_of={changed.reads!r}",
    )
    if changed.measure == config.measure:
        return changed
    check(
        changed.modes.evaluation not in ("running", "prefix"),
        f"measure={changed.measure!r} cannot be read from running averages, which were "
        f"measured as {config.measure!r}; change the statistics too, to 'batch' or "
        "'sequence' (eval_statistics= for an evaluation)",
    )
    check(
        not training,
        f"measure={changed.measure!r} in training mode would enter running averages of "
        f"{config.measure!r}; call model.eval() before",
    )
    return changed
