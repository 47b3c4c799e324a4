"""The statistics mode of a model's adaptive routers: which it has, and another for a while."""

import contextlib
from collections.abc import Iterator

from torch import nn

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import check
from acmoe.routing.statistics import override_statistics

NONE = "none"  # of a model without adaptive routers


def own_statistics(model: nn.Module) -> str:
    """The mode adaptive routers evaluate in; joined by + where they differ."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    modes = {config.modes[1] for config in configs if isinstance(config, AdaptiveConfig)}
    return "+".join(sorted(modes)) or NONE


@contextlib.contextmanager
def using_statistics(model: nn.Module, mode: str | None) -> Iterator[str]:
    """Evaluate in that mode inside `with`, None being the model's own; yields its name."""
    own = own_statistics(model)
    if mode is None or mode == own:
        yield own
        return
    check(own != NONE, f"statistics={mode}: the model has no adaptive router; leave it out")
    with override_statistics(model, eval_statistics=mode):
        yield mode
