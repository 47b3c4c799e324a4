"""Get the statistics mode of a model's adaptive routers, or change it for an evaluation."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import check
from acmoe.routing.statistics.override import adaptive_configs, override_statistics

NONE = "none"  # the mode of a model without adaptive routers


def own_statistics(model: nn.Module) -> str:
    """Return the evaluation mode of the adaptive routers; different modes are joined by +."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    modes = {config.modes.evaluation for config in configs if isinstance(config, AdaptiveConfig)}
    return "+".join(sorted(modes)) or NONE


@contextlib.contextmanager
def using_statistics(model: nn.Module, mode: str | None) -> Iterator[str]:
    """Evaluate in a statistics mode inside `with` (None: the model's own), and yield its name."""
    own = own_statistics(model)
    if mode is None or mode == own:
        yield own
        return
    check(own != NONE, f"statistics={mode}: the model has no adaptive router; leave it out")
    positional = mode in ("prefix", "sequence")
    check(
        not positional or all(config.reads == "current" for *_, config in adaptive_configs(model)),
        f"statistics={mode} needs routers that measure the tokens of their own layer, and this "
        "model was trained with those of the previous layer; choose batch or running, or train "
        "with model.router.statistics_of=current",
    )
    with override_statistics(model, eval_statistics=mode):
        yield mode


def check_statistics(model: nn.Module, modes: Iterable[str]) -> None:
    """Raise for a mode that the model cannot be evaluated in, before the first pass begins."""
    for mode in modes:
        with using_statistics(model, mode):
            pass
