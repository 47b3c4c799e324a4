"""Models of transformers inside of wrappers: those of PEFT, torch.compile, DDP and FSDP."""

import sys
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from acmoe.errors import check

# Steps that wrappers of a part of the model add to the dotted names of modules.
STEPS = {"base_layer", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def outermost_models(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the models of transformers in a module that are in no other one."""
    if isinstance(model, PreTrainedModel):
        yield model
    else:
        for child in model.children():
            yield from outermost_models(child)


def unwrapped_name(name: str) -> str:
    """Return the dotted name that a module would have without wrappers."""
    return ".".join(step for step in name.split(".") if step not in STEPS)


def adds_to_output(module: nn.Module) -> bool:
    """Return True for a PEFT layer that adds a product of h to the output of its module.

    `lora.Linear` adds B A h to the module's output. A `ParamWrapper`, which is what
    `target_parameters` makes, changes the weights that the module itself computes with.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return (
        tuners is not None
        and isinstance(module, tuners.BaseTunerLayer)
        and type(module).__name__ != "ParamWrapper"
    )


def check_adapter(router: str, around: nn.Module) -> None:
    """Raise a UserError if the module around a router is a layer of PEFT that reads h beside it."""
    check(
        not adds_to_output(around),
        f"{router} is inside a {type(around).__name__} of PEFT, which would add a product of h to "
        "scores of M h; merge a trained adapter (merge_and_unload) before acmoe.attach, or name "
        "the router's weight in target_parameters, not in target_modules",
    )
