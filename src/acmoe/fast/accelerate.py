"""Install fast runners in a model, remove them, and report why they cannot run."""

from torch import nn

from acmoe.config.environment import fast_requested
from acmoe.fast.decoding import captured_steps
from acmoe.fast.images import attend_on_map, map_unsupported
from acmoe.fast.text import FastRunner, runner_unsupported
from acmoe.models.images.window import WindowAttention, attend_by_windows
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.generate import decode_steps
from acmoe.models.text.stack import run_blocks
from acmoe.ops.dispatch import log_once

PLAIN = "the model has its plain runner; acmoe.fast.accelerate(model) changes that"


def accelerate(model: nn.Module) -> nn.Module:
    """Make the model's blocks run on the fast path wherever it computes the same function.

    Change the model in place and return it. A model without a fast path is not changed.
    """
    if fast_requested() == "never":
        log_once("ACMOE_FAST=never: models run on the plain path")
        return model
    for module in model.modules():
        if isinstance(module, LanguageModel):
            if not isinstance(module.runner, FastRunner):  # one that is there may be compiled
                module.runner = FastRunner()
            module.decode_steps = captured_steps
        elif isinstance(module, WindowAttention):
            module.attend = attend_on_map
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `accelerate`."""
    for module in model.modules():
        if isinstance(module, LanguageModel):
            module.runner = run_blocks
            module.decode_steps = decode_steps
        elif isinstance(module, WindowAttention):
            module.attend = attend_by_windows
    return model


def explain(model: nn.Module) -> str | None:
    """Return the reason why the model would not run on its fast path now, or None if it would."""
    for module in model.modules():
        if isinstance(module, LanguageModel):
            if not isinstance(module.runner, FastRunner):
                return PLAIN
            return runner_unsupported(module)
        if isinstance(module, WindowAttention):
            if module.attend is not attend_on_map:
                return PLAIN
            return map_unsupported(module)
    return f"{type(model).__name__} has no fast path"
