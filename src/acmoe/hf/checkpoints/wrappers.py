"""Models of transformers inside of wrappers: those of PEFT, torch.compile, DDP and FSDP."""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

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
