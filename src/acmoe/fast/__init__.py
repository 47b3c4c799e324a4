"""Run whole models faster, without changes in their code.

Models from `acmoe.create_model` and `acmoe.load` have their fast runner; `accelerate(model)` puts
it into any other model, and `restore(model)` takes it out. It changes how a model runs its blocks,
not what it computes: parameters, state_dict and results (up to rounding) stay the same. The fast
runner checks the model in every call. If a module has a hook, or is wrapped, quantised or
subclassed, the plain runner runs instead, and the reason is logged once; `explain(model)` returns
it.

    ACMOE_FAST=auto     as described (the default)
    ACMOE_FAST=never    `accelerate` changes nothing, and models are created with the plain runner
"""

from acmoe.fast.accelerate import accelerate, explain, restore

__all__ = ["accelerate", "explain", "restore"]
