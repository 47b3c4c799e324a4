"""Activation checkpointing that cannot send a token elsewhere the second time."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import acmoe.ops.route.autograd  # noqa: F401, defines acmoe::route

# Operators that choose: their results are kept, all others are computed again.
_CHOICES = (
    torch.ops.aten.topk.default,
    torch.ops.aten.sort.default,
    torch.ops.aten.sort.stable,
    torch.ops.aten.argmax.default,
    torch.ops.acmoe.route.default,
)


def recompute(module: nn.Module, *inputs: Any, **arguments: Any) -> Any:
    """Call the module, keeping its inputs and routing choices instead of its activations.

    Inside, autocast keeps no weights it has cast: a second call in its region would find them, and
    cast fewer than the backward does, which computes every call on its own.
    """
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        return checkpoint(module, *inputs, use_reentrant=False, context_fn=contexts, **arguments)
    finally:
        torch.set_autocast_cache_enabled(keeps)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in _CHOICES:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
