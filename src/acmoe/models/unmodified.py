"""Find out whether a module still computes what its class defines.

The fast runner and the chunked loss read the parameters of modules instead of calling them. The
result is the same only if no module is modified: hooks, adapters such as LoRA, quantised weights,
parametrizations and subclasses change the function.
"""

from torch import Tensor, nn
from torch.nn.modules import module as nn_module


def modified(module: nn.Module, expected: type[nn.Module]) -> str | None:
    """Return how the module differs from a plain instance of `expected`, or None."""
    kind = type(module)
    if kind is not expected:
        same = kind.__name__ == expected.__name__  # such as the Linear of PEFT
        name = f"{kind.__module__}.{kind.__name__}" if same else kind.__name__
        return f"is a {name}, not a {expected.__name__}"
    if hooked(module):
        return "has hooks"
    if "forward" in module.__dict__:
        return "has a forward method of its own"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) not in (nn.Parameter, Tensor):
            return f"has a {type(parameter).__name__} as its {name}"
    return None


def hooked(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
    )
