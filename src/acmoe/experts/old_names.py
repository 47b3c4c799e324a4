"""Names of version 0.1 that still work: the argument `emit` and the tensors of saved layers."""

import warnings
from typing import Any

from torch import nn

NOT_GIVEN = "not given"  # the default of `emit`, for which None is a value


def renamed_emit(next_router: Any, emit: Any) -> Any:
    """Return next_router; if its old name `emit` was given, warn and return that value."""
    if isinstance(emit, str) and emit == NOT_GIVEN:
        return next_router
    warnings.warn(
        "emit= is now called next_router=; the old name goes with version 0.3",
        FutureWarning,
        stacklevel=3,
    )
    return emit


def rename_emitter(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Read the state_dicts of version 0.1, where `next_state` was called `emitter`."""
    for key in [key for key in state_dict if key.startswith(f"{prefix}emitter.")]:
        state_dict[prefix + current_name(key.removeprefix(prefix))] = state_dict.pop(key)


def current_name(name: str) -> str:
    """Return the present name of a tensor, which version 0.1 may have stored by another."""
    parts = ("next_state" if part == "emitter" else part for part in name.split("."))
    return ".".join(part for part in parts if part != "remedies")  # variants, acmoe/lab/variants
